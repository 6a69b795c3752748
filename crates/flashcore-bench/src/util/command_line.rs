//! Command lines as texts: what people copy into a shell.

/// Arguments in a row, those with spaces between quotes.
pub fn command_line<T: AsRef<str>>(arguments: &[T]) -> String {
    let quoted = |argument: &T| {
        let argument = argument.as_ref();
        if argument.contains(' ') { format!("'{argument}'") } else { argument.to_owned() }
    };
    arguments.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_with_spaces_are_quoted() {
        assert_eq!(command_line(&["bench", "--dtype", "bf16 kv e4m3"]), "bench --dtype 'bf16 kv e4m3'");
        assert_eq!(command_line::<&str>(&[]), "");
    }
}
