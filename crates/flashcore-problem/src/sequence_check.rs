//! Checks of the operands that say where sequences lie: offsets, lengths, cache batches and page tables.

use crate::{CallStrides, InputViews, Invalid, Operand, Problem, TensorError};

/// Everything that is wrong with the operands of a problem that say where its sequences lie
/// ([`Operand::is_of_sequences`]), and with nothing else: what [`InputViews::validate`] says of them. `bytes` gives the
/// whole operand, aligned for its numbers; `None` where there is none.
///
/// ```
/// # use flashcore_problem as flashcore;
/// use flashcore::{DType, Operand, Problem, TensorError, check_sequence_operands};
///
/// let problem = Problem::new(2, 1, 1, 8, DType::F32).with_seqused_k(true);
/// let lengths = [1_u32, 7];
/// let bytes = zerocopy::IntoBytes::as_bytes(&lengths);
/// let found = check_sequence_operands(&problem, |operand| (operand == Operand::SequsedK).then_some(bytes));
/// assert_eq!(found, Err(vec![TensorError::KeyLength { batch: 1, length: 7, key_length: 1 }].into()));
/// ```
///
/// # Panics
///
/// When `bytes` gives numbers that are not aligned or not whole.
pub fn check_sequence_operands<'a>(
    problem: &Problem,
    bytes: impl Fn(Operand) -> Option<&'a [u8]>,
) -> Result<(), Invalid> {
    problem.validate()?;
    let views = InputViews::vectors(|operand| bytes(operand).filter(|_| operand.is_of_sequences()));
    let mut errors = Vec::new();
    for row in Problem::OPERANDS.iter().filter(|row| row.operand.is_of_sequences()) {
        row.check(problem, views.slot(row.operand), CallStrides::NONE, &mut errors);
    }
    if errors.is_empty() {
        views.check_sequences(problem, &mut errors);
    }
    if errors.is_empty() { Ok(()) } else { Err(errors.into()) }
}

impl InputViews<'_> {
    /// Offsets, lengths and pages of all sequences, once every vector has its size.
    pub(crate) fn check_sequences(&self, problem: &Problem, errors: &mut Vec<TensorError>) {
        // A batch may be any number where nothing has an entry for each sequence.
        if !problem.has_device_lengths() && problem.kv_batch.is_none() && problem.paged.is_none() {
            return;
        }
        let before = errors.len();
        check_offsets(
            "cu_seqlens_q",
            self.cu_seqlens_q,
            (problem.query_length, "query_length"),
            problem.total_q,
            errors,
        );
        check_offsets("cu_seqlens_k", self.cu_seqlens_k, (problem.key_length, "key_length"), problem.total_k, errors);
        if errors.len() > before {
            return;
        }
        let capacity = |offsets: Option<&[u32]>, sequence: usize, otherwise: usize| match offsets {
            Some(offsets) => ((offsets[sequence + 1] - offsets[sequence]) as usize, "its rows in cu_seqlens"),
            None => (otherwise, "the bound of the problem"),
        };
        for sequence in 0..problem.batch {
            let mut check = |tensor, values: Option<&[u32]>, (most, bound): (usize, &'static str)| {
                let value = values.map(|values| values[sequence]);
                if let Some(value) = value.filter(|&value| value as usize > most) {
                    errors.push(TensorError::BeyondBound { tensor, sequence, value, most, bound });
                }
                value.map_or(most, |value| (value as usize).min(most))
            };
            check("seqused_q", self.seqused_q, capacity(self.cu_seqlens_q, sequence, problem.query_length));
            let keys = capacity(self.cu_seqlens_k, sequence, problem.key_length);
            let keys =
                if self.cu_seqlens_k.is_none() && self.seqused_k.is_some_and(|used| used[sequence] as usize > keys.0) {
                    let (length, key_length) = (self.seqused_k.unwrap_or_default()[sequence], problem.key_length);
                    errors.push(TensorError::KeyLength { batch: sequence, length, key_length });
                    continue;
                } else {
                    check("seqused_k", self.seqused_k, keys)
                };
            check("leftpad_k", self.leftpad_k, (keys, "the keys of the sequence"));
            let batches = problem.cache_batches().saturating_sub(1);
            check("kv_batch_idx", self.kv_batch_idx, (batches, "the last batch of the cache"));
        }
        if errors.len() > before {
            return;
        }
        let Some((paged, table)) = problem.paged.zip(self.page_table) else { return };
        for sequence in 0..problem.batch {
            let row = self.kv_batch_idx.map_or(sequence, |batches| batches[sequence] as usize);
            let keys =
                self.sequence(problem, sequence).key_length + self.leftpad_k.map_or(0, |pad| pad[sequence] as usize);
            let pages = table[row * paged.table_stride..].iter().take(keys.div_ceil(paged.page_size)).enumerate();
            let wrong = pages.filter(|&(_, &page)| usize::try_from(page).map_or(true, |page| page >= paged.num_pages));
            errors.extend(wrong.take(1).map(|(entry, &page)| TensorError::Page {
                sequence,
                entry,
                page,
                num_pages: paged.num_pages,
            }));
        }
    }
}

pub(crate) fn check_offsets(
    tensor: &'static str,
    offsets: Option<&[u32]>,
    (most, bound): (usize, &'static str),
    total: Option<usize>,
    errors: &mut Vec<TensorError>,
) {
    let (Some(offsets), Some(total)) = (offsets, total) else { return };
    if let Some(&first) = offsets.first().filter(|&&first| first != 0) {
        errors.push(TensorError::FirstOffset { tensor, first });
    }
    for (sequence, pair) in offsets.windows(2).enumerate() {
        let (begin, end) = (pair[0], pair[1]);
        if end < begin {
            errors.push(TensorError::OffsetsFall { tensor, sequence, begin, end });
        } else if (end - begin) as usize > most {
            errors.push(TensorError::BeyondBound { tensor, sequence, value: end - begin, most, bound });
        } else if end as usize > total {
            let bound = "the rows of all sequences";
            errors.push(TensorError::BeyondBound { tensor, sequence, value: end, most: total, bound });
        }
    }
}
