//! Structs and constants of `include/flashcore.h`, read from its text and laid out as a C compiler does.

use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;

/// Where a field lies, and what it is.
#[derive(Clone, Copy, Debug)]
struct Field {
    offset: usize,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Integer32,
    Integer64,
    Float,
    Double,
    Address,
}

impl Kind {
    fn size(self) -> usize {
        match self {
            Self::Integer32 | Self::Float => 4,
            Self::Integer64 | Self::Double | Self::Address => 8,
        }
    }
}

/// A struct: its size, and its fields by name; those of structs inside it as `outer.inner`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layout {
    pub(crate) size: usize,
    alignment: usize,
    fields: HashMap<String, Field>,
}

/// Declarations of the header.
pub(crate) struct Header {
    layouts: HashMap<String, Layout>,
    constants: HashMap<String, i64>,
}

impl Header {
    /// The header of this crate.
    pub(crate) fn get() -> &'static Self {
        static HEADER: OnceLock<Header> = OnceLock::new();
        HEADER.get_or_init(|| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/flashcore.h");
            Self::parse(&std::fs::read_to_string(path).unwrap())
        })
    }

    fn parse(text: &str) -> Self {
        let mut header = Self { layouts: HashMap::new(), constants: HashMap::new() };
        let mut open: Option<Layout> = None;
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//") && !line.starts_with('*')) {
            let words: Vec<&str> = line.trim_end_matches(';').split_whitespace().collect();
            match (&mut open, words.as_slice()) {
                (None, ["#define", name, value]) => {
                    if let Ok(value) = value.parse() {
                        header.constants.insert((*name).to_owned(), value);
                    }
                }
                (None, ["typedef", "struct", _, "{"]) => {
                    open = Some(Layout { size: 0, alignment: 1, fields: HashMap::new() });
                }
                (Some(_), ["}", name]) => {
                    let mut layout = open.take().unwrap();
                    layout.size = layout.size.next_multiple_of(layout.alignment);
                    header.layouts.insert((*name).to_owned(), layout);
                }
                (Some(layout), [words @ .., name]) => {
                    let words: Vec<&str> = words.iter().copied().filter(|word| *word != "const").collect();
                    match words.as_slice() {
                        ["struct", inner] if !name.starts_with('*') => layout.append(name, &header.layouts[*inner]),
                        [kind] if name.ends_with(']') => {
                            let (name, count) = name.trim_end_matches(']').split_once('[').unwrap();
                            for index in 0..count.parse::<usize>().unwrap() {
                                layout.append(&format!("{name}.{index}"), &scalar(kind, false));
                            }
                        }
                        ["struct", inner] => layout.append(name.trim_start_matches('*'), &scalar(inner, true)),
                        [kind] => layout.append(name.trim_start_matches('*'), &scalar(kind, name.starts_with('*'))),
                        other => panic!("the header has a field of a kind that this test does not know: {other:?}"),
                    }
                }
                _ => {}
            }
        }
        header
    }

    /// A constant by its name after `FLASHCORE_`.
    pub(crate) fn constant(&self, name: &str) -> i32 {
        let value = self.constants.get(&format!("FLASHCORE_{name}")).unwrap_or_else(|| panic!("no FLASHCORE_{name}"));
        i32::try_from(*value).unwrap()
    }

    pub(crate) fn layout(&self, name: &str) -> &Layout {
        self.layouts.get(name).unwrap_or_else(|| panic!("the header has no {name}"))
    }
}

fn scalar(kind: &str, is_address: bool) -> Layout {
    let kind = match kind {
        _ if is_address => Kind::Address,
        "uint64_t" | "int64_t" => Kind::Integer64,
        "int32_t" | "uint32_t" => Kind::Integer32,
        "float" => Kind::Float,
        "double" => Kind::Double,
        other => panic!("the header has a {other}, which this test does not know"),
    };
    let fields = HashMap::from([(String::new(), Field { offset: 0, kind })]);
    Layout { size: kind.size(), alignment: kind.size(), fields }
}

impl Layout {
    fn append(&mut self, name: &str, inner: &Self) {
        let offset = self.size.next_multiple_of(inner.alignment);
        for (field, &Field { offset: inside, kind }) in &inner.fields {
            let name = if field.is_empty() { name.to_owned() } else { format!("{name}.{field}") };
            self.fields.insert(name, Field { offset: offset + inside, kind });
        }
        self.size = offset + inner.size;
        self.alignment = self.alignment.max(inner.alignment);
    }

    /// Names of the fields that are integers, in the order of the struct.
    fn integers(&self) -> Vec<&str> {
        let is_integer = |field: &Field| matches!(field.kind, Kind::Integer32 | Kind::Integer64);
        let mut found: Vec<(usize, &str)> = self
            .fields
            .iter()
            .filter(|(_, field)| is_integer(field))
            .map(|(name, field)| (field.offset, name.as_str()))
            .collect();
        found.sort_unstable();
        found.into_iter().map(|(_, name)| name).collect()
    }

    pub(crate) fn is_double(&self, name: &str) -> bool {
        self.fields[name].kind == Kind::Double
    }
}

/// A struct of the header in memory.
#[derive(Clone, Debug)]
pub(crate) struct Struct {
    words: Vec<u64>,
    layout: &'static Layout,
}

impl Struct {
    /// All zeros.
    pub(crate) fn zeroed(name: &str) -> Self {
        let layout = Header::get().layout(name);
        assert!(layout.size.is_multiple_of(8) && layout.alignment == 8, "{name} is not made of words");
        Self { words: vec![0; layout.size / 8], layout }
    }

    /// Names of the fields that are integers, in the order of the struct; lengths of memory are not among them.
    pub(crate) fn sizes(&self) -> Vec<&'static str> {
        self.layout.integers().into_iter().filter(|&name| name != "bytes").collect()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.layout.size
    }

    /// A struct inside of this one.
    pub(crate) fn inner(&self, field: &str, name: &str) -> Self {
        let mut inner = Self::zeroed(name);
        let (prefix, count) = (format!("{field}."), inner.words.len());
        let first =
            self.layout.fields.iter().filter(|(name, _)| name.starts_with(&prefix)).map(|(_, field)| field.offset);
        let first = first.min().unwrap() / 8;
        inner.words.copy_from_slice(&self.words[first..first + count]);
        inner
    }

    pub(crate) fn address(&self) -> *const u64 {
        self.words.as_ptr()
    }

    pub(crate) fn address_mut(&mut self) -> *mut u64 {
        self.words.as_mut_ptr()
    }

    fn field(&self, name: &str) -> Field {
        *self.layout.fields.get(name).unwrap_or_else(|| panic!("the header has no field {name}"))
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let word = &mut self.words[offset / 8];
        let mut inside = word.to_ne_bytes();
        inside[offset % 8..][..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(inside);
    }

    /// Sets an integer or an address.
    pub(crate) fn set(&mut self, name: &str, value: i128) -> &mut Self {
        let Field { offset, kind } = self.field(name);
        match kind {
            Kind::Integer32 => self.write(offset, &(value as i32).to_ne_bytes()),
            Kind::Integer64 | Kind::Address => self.write(offset, &(value as u64).to_ne_bytes()),
            Kind::Float | Kind::Double => panic!("{name} is no integer"),
        }
        self
    }

    /// Sets a number of the width that the header says.
    pub(crate) fn set_real(&mut self, name: &str, value: f64) -> &mut Self {
        let Field { offset, kind } = self.field(name);
        match kind {
            Kind::Float => self.write(offset, &(value as f32).to_ne_bytes()),
            Kind::Double => self.write(offset, &value.to_ne_bytes()),
            _ => panic!("{name} is an integer"),
        }
        self
    }

    /// An integer or an address.
    pub(crate) fn get(&self, name: &str) -> i128 {
        let Field { offset, kind } = self.field(name);
        let bytes = self.words[offset / 8].to_ne_bytes();
        match kind {
            Kind::Integer32 => i128::from(i32::from_ne_bytes(bytes[offset % 8..][..4].try_into().unwrap())),
            Kind::Integer64 | Kind::Address => i128::from(u64::from_ne_bytes(bytes)),
            Kind::Float | Kind::Double => panic!("{name} is no integer"),
        }
    }
}

/// The tensors of a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tensors {
    pub(crate) entries: Vec<Struct>,
}

/// A type of Rust that a tensor may have.
pub(crate) trait Plain {
    /// Its name after `FLASHCORE_DTYPE_`.
    const DTYPE: &'static str;
}

macro_rules! plain {
    ($($Type:ty: $name:literal;)*) => {
        $(impl Plain for $Type {
            const DTYPE: &'static str = $name;
        })*
    };
}

plain! {
    f32: "F32";
    u8: "E4M3";
    u32: "I32";
    i32: "I32";
    i64: "I64";
}

impl Tensors {
    /// Adds a tensor; the operand by its name, the type by its number.
    pub(crate) fn push(&mut self, operand: &str, dtype: i32, (data, bytes): (*const u8, usize)) -> &mut Struct {
        let mut tensor = Struct::zeroed("flashcore_tensor_t");
        tensor.set("operand", Header::get().constant(&operand.to_uppercase()).into()).set("dtype", dtype.into());
        tensor.set("data", data.addr() as i128).set("bytes", bytes as i128);
        self.entries.push(tensor);
        self.entries.last_mut().unwrap()
    }

    /// Adds a tensor of floats or integers of 32 bits.
    pub(crate) fn push_as(&mut self, operand: &str, dtype: &str, range: (*const u8, usize)) -> &mut Struct {
        self.push(operand, Header::get().constant(&format!("DTYPE_{dtype}")), range)
    }

    /// Adds values that are read, with strides of the call.
    pub(crate) fn with<T: Plain>(self, operand: &str, values: &[T], strides: &[u64]) -> Self {
        self.add::<T>(operand, (values.as_ptr().cast(), size_of_val(values)), strides)
    }

    /// Adds values that are written, which nobody else may use until the call is over.
    pub(crate) fn with_mut<T: Plain>(self, operand: &str, values: &mut [T], strides: &[u64]) -> Self {
        let bytes = size_of_val(values);
        self.add::<T>(operand, (values.as_mut_ptr().cast_const().cast(), bytes), strides)
    }

    fn add<T: Plain>(mut self, operand: &str, range: (*const u8, usize), strides: &[u64]) -> Self {
        let tensor = self.push_as(operand, T::DTYPE, range);
        for (index, &stride) in strides.iter().enumerate() {
            tensor.set(&format!("strides.{index}"), stride.into());
        }
        self
    }

    /// The tensor of an operand.
    pub(crate) fn get(&mut self, operand: &str) -> Option<&mut Struct> {
        let number = i128::from(Header::get().constant(&operand.to_uppercase()));
        self.entries.iter_mut().find(|tensor| tensor.get("operand") == number)
    }

    /// The same without an operand.
    pub(crate) fn without(mut self, operand: &str) -> Self {
        let number = i128::from(Header::get().constant(&operand.to_uppercase()));
        self.entries.retain(|tensor| tensor.get("operand") != number);
        self
    }

    /// The tensors one after the other, as a call takes them.
    pub(crate) fn words(&self) -> Vec<u64> {
        self.entries.iter().flat_map(|tensor| tensor.words.iter().copied()).collect()
    }
}
