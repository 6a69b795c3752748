//! Unused tensors that look like inputs under another name.
//!
//! Attention without the mask or the sinks that a file holds is a wrong result that looks right.

use flashcore_bench::util::nearest::nearest;

use super::tensors::OPTIONAL;

/// Names of the inputs in other libraries, without underscores, dots and capitals, and in this one.
const ALIASES: [(&[&str], &str); 11] = [
    (&["q", "queries", "querystates", "qstates", "xq"], "name it with --query-name, in place of the query"),
    (
        &["k", "keys", "keystates", "kstates", "xk", "kcache", "keycache"],
        "name it with --key-name, in place of the key",
    ),
    (
        &["v", "values", "valuestates", "vstates", "xv", "vcache", "valuecache"],
        "name it with --value-name, in place of the value",
    ),
    (
        &["bias", "attnbias", "attentionbias", "positionbias", "relbias", "relativebias", "scorebias"],
        "what is added to scores is `bias` [batch, heads, queries, keys]",
    ),
    (&["sink", "attnsinks", "attentionsinks", "attnsink", "attentionsink", "saux"], "sinks are `sinks` [heads]"),
    (&["alibi", "slopes", "slope", "alibislope", "alibibias"], "slopes of ALiBi are `alibi_slopes` [heads]"),
    (
        &[
            "keylengths",
            "cacheseqlens",
            "cachelengths",
            "seqlens",
            "seqlensk",
            "seqlenk",
            "kvlengths",
            "kvlens",
            "kvseqlens",
            "kvlen",
            "lengths",
            "keylens",
            "keylength",
            "contextlens",
            "seqlenskv",
            "sequencelengths",
        ],
        "the keys in use of each batch are `seqused_k` [batch]",
    ),
    (&["scale", "softmaxscale", "smscale"], "the scale is --scale"),
    (
        &[
            "descale",
            "qdescale",
            "kdescale",
            "vdescale",
            "qscales",
            "kscales",
            "vscales",
            "queryscale",
            "keyscale",
            "valuescale",
            "kvscale",
        ],
        "scales of 8-bit tensors are `q_scale`, `k_scale` and `v_scale`",
    ),
    (&["softcap", "logitcap", "logitsoftcap", "attnlogitsoftcapping"], "the softcap is --softcap"),
    (
        &["cuseqlens", "cuseqlensq", "cuseqlensk", "blocktable", "blocktables", "pagetable", "blockmask"],
        "packed sequences, pages and block masks are not supported",
    ),
];

/// Advice about an unused tensor that looks like an input; none for any other.
pub(super) fn advice(name: &str) -> Option<String> {
    let plain: String = name.chars().filter(|letter| letter.is_alphanumeric()).flat_map(char::to_lowercase).collect();
    if plain.contains("mask") {
        return Some(
            "a mask of tensors is `bias` [batch, heads, queries, keys] with -inf for masked keys; --mask has \
             causal masks and windows, and `seqused_k` [batch] the keys in use of each batch"
                .to_owned(),
        );
    }
    if let Some((_, advice)) = ALIASES.iter().find(|(names, _)| names.contains(&plain.as_str())) {
        return Some((*advice).to_owned());
    }
    // Misspelt by a letter or two, or written otherwise.
    let spelt = |known: &str| known.replace('_', "") == plain;
    let meant = OPTIONAL.into_iter().find(|known| spelt(known)).or_else(|| nearest(name, OPTIONAL));
    meant.map(|meant| format!("did you mean `{meant}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_libraries_have_advice_and_others_none() {
        let check = |name: &str, expected: Option<&str>| assert_eq!(advice(name).as_deref(), expected, "{name}");
        let mask = "a mask of tensors is `bias` [batch, heads, queries, keys] with -inf for masked keys; --mask has causal masks and windows, and `seqused_k` [batch] the keys in use of each batch";
        for name in ["mask", "attn_mask", "attention_mask", "key_padding_mask", "Mask", "causalMask"] {
            check(name, Some(mask));
        }
        check("attn_bias", Some("what is added to scores is `bias` [batch, heads, queries, keys]"));
        check("Bias", Some("what is added to scores is `bias` [batch, heads, queries, keys]"));
        check("s_aux", Some("sinks are `sinks` [heads]"));
        check("slopes", Some("slopes of ALiBi are `alibi_slopes` [heads]"));
        check("cache_seqlens", Some("the keys in use of each batch are `seqused_k` [batch]"));
        check("keyLengths", Some("the keys in use of each batch are `seqused_k` [batch]"));
        check("cu_seqlens_q", Some("packed sequences, pages and block masks are not supported"));
        check("k_cache", Some("name it with --key-name, in place of the key"));
        check("softmax_scale", Some("the scale is --scale"));
        check("k_descale", Some("scales of 8-bit tensors are `q_scale`, `k_scale` and `v_scale`"));
        check("sequsedK", Some("did you mean `seqused_k`?"));
        check("Sinks", Some("did you mean `sinks`?"));
        check("alibi_slops", Some("did you mean `alibi_slopes`?"));
        for name in ["output", "lse", "layer.0.weight", "note", "positions", "expected"] {
            check(name, None);
        }
    }
}
