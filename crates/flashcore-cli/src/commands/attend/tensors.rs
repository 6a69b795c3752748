//! From the tensors of a file to a problem, and from its outputs to a file.

use flashcore_bench::util::printable::printable;
use flashcore_problem::{
    BiasStrides, BiasView, DType, InputViews, Inputs, Layout, Operand, Outputs, Problem, Scale, Shape, TensorView,
};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView as FileTensor};

use super::look_alikes::advice;
use super::scales::scale;

/// Tensors that take part when they are there.
pub(super) const OPTIONAL: [&str; 7] = ["alibi_slopes", "sinks", "bias", "seqused_k", "q_scale", "k_scale", "v_scale"];

/// Names of the tensors in a file.
pub(super) struct Names<'a> {
    pub(super) query: &'a str,
    pub(super) key: &'a str,
    pub(super) value: &'a str,
    /// Tensors to leave out, whatever they are called.
    pub(super) ignored: &'a [String],
}

/// Contents of a file: a problem and its numbers.
pub(super) struct Contents<'a> {
    pub(super) problem: Problem,
    /// Names of unused tensors.
    pub(super) unused: Vec<String>,
    query: TensorView<'a>,
    key: TensorView<'a>,
    value: TensorView<'a>,
    alibi_slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    bias: Option<(Vec<f32>, BiasStrides)>,
    seqused_k: Option<Vec<u32>>,
    /// Of query, key and value.
    scales: [Option<Scale>; Operand::SCALES.len()],
}

/// One of query, key and value.
struct Main<'a> {
    name: &'a str,
    dims: [usize; 4],
    shape: Shape,
    view: TensorView<'a>,
}

impl<'a> Contents<'a> {
    /// The problem of a file, or what is wrong with which tensor and what is allowed.
    /// An FP8 query needs the type of the output.
    pub(super) fn read(
        file: &SafeTensors<'a>,
        layout: Layout,
        names: &Names<'a>,
        out_dtype: Option<DType>,
    ) -> Result<Self, String> {
        let query = Main::read(file, "query", names.query, layout)?;
        let key = Main::read(file, "key", names.key, layout)?;
        let value = Main::read(file, "value", names.value, layout)?;
        if !key.view.dtype.is_float8() {
            key.agrees("dtype", &key.view.dtype, query.name, &query.view.dtype)?;
        }
        value.agrees("dtype", &value.view.dtype, key.name, &key.view.dtype)?;
        for other in [&key, &value] {
            other.agrees("batch", &other.shape.batch, query.name, &query.shape.batch)?;
        }
        key.agrees("dim", &key.shape.columns, query.name, &query.shape.columns)?;
        value.agrees("heads", &value.shape.heads, key.name, &key.shape.heads)?;
        value.agrees("rows", &value.shape.rows, key.name, &key.shape.rows)?;

        let Shape { batch, heads, rows, columns } = query.shape;
        let output = match (query.view.dtype, out_dtype) {
            (dtype, Some(output)) => Some(output).filter(|output| *output != dtype),
            (dtype, None) if dtype.is_float8() => {
                return Err(format!(
                    "{} is {dtype}, which no output is; --out-dtype f16 or --out-dtype bf16 says what the output is",
                    query.name
                ));
            }
            (_, None) => None,
        };
        let mut problem = Problem::new(batch, heads, rows, columns, query.view.dtype).with_out_dtype(output);
        problem.kv_dtype = Some(key.view.dtype).filter(|dtype| *dtype != query.view.dtype);
        (problem.key_heads, problem.key_length) = (key.shape.heads, key.shape.rows);
        problem.value_dim = value.shape.columns;
        problem.layout = layout;

        let alibi_slopes = floats(file, "alibi_slopes", &[heads], "[query heads]")?;
        let sinks = floats(file, "sinks", &[heads], "[query heads]")?;
        let bias = bias(file, &problem)?;
        let seqused_k = seqused_k(file, &problem)?;
        (problem.alibi, problem.sinks) = (alibi_slopes.is_some(), sinks.is_some());
        (problem.bias, problem.seqused_k) = (bias.is_some(), seqused_k.is_some());
        let [q_scale, k_scale, v_scale] = Operand::SCALES.map(|operand| scale(file, operand, &problem));
        let scales = [q_scale?, k_scale?, v_scale?];
        [problem.q_scale, problem.k_scale, problem.v_scale] = scales.each_ref().map(Option::is_some);

        let unused = unused(file, names)?;
        let (query, key, value) = (query.view, key.view, value.view);
        Ok(Self { problem, unused, query, key, value, alibi_slopes, sinks, bias, seqused_k, scales })
    }

    /// The numbers, for a plan.
    pub(super) fn views(&self) -> InputViews<'_> {
        let mut views = InputViews::new(self.query, self.key, self.value);
        views.alibi_slopes = self.alibi_slopes.as_deref();
        views.sinks = self.sinks.as_deref();
        views.bias = self.bias.as_ref().map(|(data, strides)| BiasView { data, strides: *strides });
        views.seqused_k = self.seqused_k.as_deref();
        [views.q_scale, views.k_scale, views.v_scale] =
            self.scales.each_ref().map(|scale| scale.as_ref().map(Scale::view));
        views
    }

    /// The numbers, for the simulator and the oracle.
    pub(super) fn inputs(&self) -> Inputs {
        self.views().to_owned_inputs()
    }

    /// The bytes of a file with the outputs.
    pub(super) fn written(&self, outputs: &Outputs) -> Result<Vec<u8>, String> {
        let problem = &self.problem;
        let Shape { batch, heads, rows, columns } = problem.output_shape();
        let shape = if problem.layout == Layout::Bshd {
            vec![batch, rows, heads, columns]
        } else {
            vec![batch, heads, rows, columns]
        };
        let sums: Option<Vec<u8>> =
            outputs.lse.as_ref().map(|rows| rows.iter().flat_map(|row| row.to_le_bytes()).collect());
        let tensor = |dtype, shape, data| FileTensor::new(dtype, shape, data).map_err(|error| error.to_string());
        let mut tensors = vec![("output", tensor(file_dtype(problem.dtypes().output), shape, &outputs.output.data)?)];
        if let Some(sums) = &sums {
            tensors.push(("lse", tensor(Dtype::F32, vec![batch, heads, rows], sums)?));
        }
        safetensors::serialize(tensors, None).map_err(|error| error.to_string())
    }
}

impl<'a> Main<'a> {
    fn read(file: &SafeTensors<'a>, role: &str, name: &'a str, layout: Layout) -> Result<Self, String> {
        let Some(tensor) = find(file, name) else {
            let mut there = file.names();
            there.sort_unstable();
            let there =
                if there.is_empty() { "no tensor".to_owned() } else { printable(&there.join(", ")).into_owned() };
            return Err(format!(
                "there is no tensor `{name}`; query, key and value are needed, and the file has {there}; --{role}-name says what the {role} is called"
            ));
        };
        let Some(dtype) = problem_dtype(tensor.dtype()) else {
            return Err(format!("{name} is {:?}; it must be F16, BF16, F32, F64, F8_E4M3 or F8_E5M2", tensor.dtype()));
        };
        let axes = if layout == Layout::Bshd { "[batch, rows, heads, dim]" } else { "[batch, heads, rows, dim]" };
        let Ok(dims) = <[usize; 4]>::try_from(tensor.shape()) else {
            let (shape, rank) = (tensor.shape(), tensor.shape().len());
            return Err(format!("{name} has shape {shape:?}, {rank} axes; it must have 4: {axes}"));
        };
        let [batch, second, third, columns] = dims;
        let (heads, rows) = if layout == Layout::Bshd { (third, second) } else { (second, third) };
        let shape = Shape { batch, heads, rows, columns };
        Ok(Self { name, dims, shape, view: TensorView { dtype, data: tensor.data() } })
    }

    /// Requires that a property equals that of another tensor.
    fn agrees<T>(&self, what: &str, own: &T, other: &str, others: &T) -> Result<(), String>
    where
        T: PartialEq + std::fmt::Display,
    {
        if own == others {
            return Ok(());
        }
        let Self { name, dims, .. } = self;
        Err(format!("{name} has shape {dims:?} and {what} {own}; its {what} must be {others}, like that of {other}"))
    }
}

/// The unused tensors, sorted; one that looks like an input is an error.
fn unused(file: &SafeTensors<'_>, names: &Names<'_>) -> Result<Vec<String>, String> {
    let known = |name: &&str| [names.query, names.key, names.value].contains(name) || OPTIONAL.contains(name);
    let mut unused: Vec<&str> = file.names().into_iter().filter(|name| !known(name)).collect();
    unused.sort_unstable();
    let is_ignored = |name: &str| names.ignored.iter().any(|ignored| ignored == name);
    for name in unused.iter().filter(|name| !is_ignored(name)) {
        let is_operand = Operand::inputs().any(|operand| operand.name() == *name);
        let unread = is_operand.then_some("`attend` does not read this operand");
        if let Some(advice) = unread.map(str::to_owned).or_else(|| advice(name)) {
            let name = printable(name);
            return Err(format!("`{name}` would not be used: {advice}; --ignore {name} leaves it out"));
        }
    }
    Ok(unused.into_iter().map(|name| printable(name).into_owned()).collect())
}

pub(super) fn find<'a>(file: &SafeTensors<'a>, name: &str) -> Option<FileTensor<'a>> {
    file.tensor(name).ok()
}

const fn problem_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::F32 => Some(DType::F32),
        Dtype::F64 => Some(DType::F64),
        Dtype::F8_E4M3 => Some(DType::E4m3),
        Dtype::F8_E5M2 => Some(DType::E5m2),
        _ => None,
    }
}

const fn file_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::E4m3 => Dtype::F8_E4M3,
        DType::E5m2 => Dtype::F8_E5M2,
    }
}

/// An optional tensor of numbers that `f32` holds exactly, of one shape.
fn floats(file: &SafeTensors<'_>, name: &str, shape: &[usize], meaning: &str) -> Result<Option<Vec<f32>>, String> {
    let Some(tensor) = find(file, name) else { return Ok(None) };
    let values = values(name, &tensor)?;
    if tensor.shape() != shape {
        return Err(format!("{name} has shape {:?}; it must be {shape:?}, {meaning}", tensor.shape()));
    }
    Ok(Some(values))
}

pub(super) fn values(name: &str, tensor: &FileTensor<'_>) -> Result<Vec<f32>, String> {
    let is_wide = |dtype: &DType| matches!(dtype, DType::F16 | DType::Bf16 | DType::F32);
    let dtype = problem_dtype(tensor.dtype()).filter(is_wide);
    let Some(dtype) = dtype else {
        return Err(format!("{name} is {:?}; it must be F16, BF16 or F32", tensor.dtype()));
    };
    Ok(tensor.data().chunks_exact(dtype.size_bytes()).map(|bytes| dtype.decode(bytes) as f32).collect())
}

fn bias(file: &SafeTensors<'_>, problem: &Problem) -> Result<Option<(Vec<f32>, BiasStrides)>, String> {
    let Some(tensor) = find(file, "bias") else { return Ok(None) };
    let values = values("bias", &tensor)?;
    let full = [problem.batch, problem.query_heads, problem.query_length, problem.key_length];
    let fits = |dims: &[usize; 4]| dims.iter().zip(full).all(|(&dim, full)| dim == full || dim == 1);
    let Some([batch, heads, rows, keys]) = <[usize; 4]>::try_from(tensor.shape()).ok().filter(fits) else {
        let shape = tensor.shape();
        return Err(format!(
            "bias has shape {shape:?}; it must be {full:?}, [batch, heads, queries, keys], or 1 to broadcast an axis"
        ));
    };
    // One element along an axis is the same for all of it.
    let stride = |dim: usize, stride: usize| if dim == 1 { 0 } else { stride };
    let strides = BiasStrides {
        batch: stride(batch, heads * rows * keys),
        head: stride(heads, rows * keys),
        row: stride(rows, keys),
        key: stride(keys, 1),
    };
    Ok(Some((values, strides)))
}

fn seqused_k(file: &SafeTensors<'_>, problem: &Problem) -> Result<Option<Vec<u32>>, String> {
    let Some(tensor) = find(file, "seqused_k") else { return Ok(None) };
    if tensor.shape() != [problem.batch] {
        let (shape, batch) = (tensor.shape(), problem.batch);
        return Err(format!("seqused_k has shape {shape:?}; it must be [{batch}], [batch]"));
    }
    let integers: Vec<i64> = match tensor.dtype() {
        Dtype::I32 => tensor.data().as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes).into()).collect(),
        Dtype::U32 => tensor.data().as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes).into()).collect(),
        Dtype::I64 => tensor.data().as_chunks().0.iter().map(|&bytes| i64::from_le_bytes(bytes)).collect(),
        dtype => return Err(format!("seqused_k is {dtype:?}; it must be I32, U32 or I64")),
    };
    let length = |(batch, &length): (usize, &i64)| {
        let most = problem.key_length;
        let fits = u32::try_from(length).ok().filter(|&length| length as usize <= most);
        fits.ok_or_else(|| {
            format!("seqused_k has {length} for batch {batch}; it must be from 0 to {most}, the rows of key")
        })
    };
    integers.iter().enumerate().map(length).collect::<Result<_, _>>().map(Some)
}
