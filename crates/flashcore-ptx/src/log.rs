//! Logs of NVIDIA's PTX compiler, in ptxas and in the driver: their figures, and the lines that complaints are about.

/// The number before the words, where a part of the log ends with them.
pub fn figure(log: &str, words: &str) -> Option<u32> {
    log.split([',', '\n']).find_map(|part| part.trim().strip_suffix(words)?.trim_end().rsplit(' ').next()?.parse().ok())
}

/// Inserts after each complaint the line of PTX that it is about.
pub fn with_lines(log: &str, ptx: &str) -> String {
    let line_of = |complaint: &str| {
        let number: usize = complaint.split_once(", line ")?.1.split_once(';')?.0.trim().parse().ok()?;
        let text = ptx.lines().nth(number.checked_sub(1)?)?;
        Some(format!("{number:>6} | {text}"))
    };
    let with_line = |complaint: &str| [Some(complaint.trim_end().to_owned()), line_of(complaint)];
    log.trim().lines().flat_map(with_line).flatten().collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_show_their_lines() {
        let ptx = ".version 7.0\n.target sm_80\nadd.rn.f16x2 %a, %b, 0x3c003c00;\n";
        let report = "ptxas kernel.ptx, line 3; error   : Arguments mismatch for instruction 'add'\n\
                      ptxas kernel.ptx, line 99; fatal   : Parsing error near '-': syntax error\n\
                      ptxas fatal   : Ptx assembly aborted due to errors\n";
        assert_eq!(
            with_lines(report, ptx),
            "ptxas kernel.ptx, line 3; error   : Arguments mismatch for instruction 'add'\n     \
             3 | add.rn.f16x2 %a, %b, 0x3c003c00;\n\
             ptxas kernel.ptx, line 99; fatal   : Parsing error near '-': syntax error\n\
             ptxas fatal   : Ptx assembly aborted due to errors"
        );
    }

    #[test]
    fn complaints_of_a_driver_show_their_lines() {
        let ptx = ".version 8.0\n.target sm_90a\nbad.f32 %a, %b;\n";
        assert_eq!(
            with_lines("ptxas application ptx input, line 3; fatal   : Parsing error near '.': syntax error\n\n", ptx),
            "ptxas application ptx input, line 3; fatal   : Parsing error near '.': syntax error\n     3 | bad.f32 %a, %b;"
        );
        assert_eq!(
            with_lines("ptxas fatal   : aborted, line x; line 0;\n", ptx),
            "ptxas fatal   : aborted, line x; line 0;"
        );
    }
}
