//! A problem as text: sizes, types, mask and everything that is switched on.

use crate::{Layout, LseForm, Operand, PagedKv, Problem};
use std::fmt;

impl Problem {
    /// The sizes that an operand of sequences brings.
    fn write_sizes(&self, operand: Operand, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = match operand {
            Operand::CuSeqlensQ => self.total_q,
            Operand::CuSeqlensK => self.total_k,
            Operand::KvBatchIdx => self.kv_batch,
            _ => None,
        };
        match (rows, self.paged) {
            (Some(rows), _) => write!(formatter, " of {rows}"),
            (None, Some(PagedKv { page_size, num_pages, table_width, table_stride }))
                if operand == Operand::PageTable =>
            {
                write!(formatter, " {table_width} by {table_stride} of {num_pages} pages of {page_size}")
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "batch {} heads {}/{} queries {} keys {} dims {}/{} {} {}",
            self.batch,
            self.query_heads,
            self.key_heads,
            self.query_length,
            self.key_length,
            self.head_dim,
            self.value_dim,
            self.dtypes(),
            self.mask
        )?;
        if let Some(softcap) = self.softcap {
            write!(formatter, " softcap {softcap}")?;
        }
        for operand in Operand::optional().filter(|operand| operand.is_present(self)) {
            write!(formatter, " {}", operand.name())?;
            self.write_sizes(operand, formatter)?;
        }
        LseForm::of(self).features().try_for_each(|feature| write!(formatter, " {feature}"))?;
        if let Some(score_mod) = self.score_mod {
            write!(formatter, " score-mod {}", score_mod.expression().name())?;
        }
        if let Some(mask_mod) = self.mask_mod {
            write!(formatter, " mask-mod {}", mask_mod.expression().name())?;
        }
        match self.layout {
            Layout::Bhsd => Ok(()),
            Layout::Bshd => formatter.write_str(" bshd"),
            Layout::PackedQkv => formatter.write_str(" packed-qkv"),
            Layout::Strided(_) => formatter.write_str(" strided"),
        }
    }
}
