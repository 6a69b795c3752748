//! What is counted, under names that people can read, and where ncu has it.

use std::collections::BTreeMap;

use flashcore_sim::Counters;
use serde::{Deserialize, Serialize};

use super::gates::GateResult;

/// A metric of a profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    /// Its name.
    pub name: String,
    /// Its unit.
    pub unit: String,
    /// What the hardware counted.
    pub hardware: Option<f64>,
    /// What the simulator counted.
    pub simulator: Option<f64>,
    /// Why the two differ, where they do by more than 2 %.
    pub difference: Option<String>,
    /// What a gate said.
    pub gate: Option<GateResult>,
}

/// Where a metric comes from.
#[derive(Debug, Clone, Copy)]
pub struct Definition {
    /// Its name.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// Names that ncu has had for it: the sum of those of the first list of which any is there.
    hardware: &'static [&'static [&'static str]],
    /// What the simulator counts.
    simulator: Option<fn(&Counters) -> f64>,
    /// What explains a difference between the two.
    difference: &'static str,
}

const fn hardware_only(
    name: &'static str,
    unit: &'static str,
    hardware: &'static [&'static [&'static str]],
) -> Definition {
    Definition { name, unit, hardware, simulator: None, difference: "" }
}

const SECTOR_BYTES: u64 = 32;
const L2_READS: &str = "L2 reads";
const DRAM_READS: &str = "DRAM reads";
const L2_READ_HIT_RATE: &str = "L2 read hit rate";

/// Beyond this part, a difference between hardware and simulator is to be explained.
const AGREEMENT: f64 = 0.02;

/// Everything that is looked at.
pub const DEFINITIONS: &[Definition] = &[
    hardware_only("time", "ns", &[&["gpu__time_duration.sum"]]),
    Definition {
        name: "tensor operations",
        unit: "",
        hardware: &[
            &["sm__ops_path_tensor_src_fp16.sum", "sm__ops_path_tensor_src_bf16_dst_fp32.sum"],
            &["sm__ops_path_tensor_src_fp16_dst_fp32.sum"],
        ],
        simulator: Some(|counters| counters.tensor_flops as f64),
        difference: "the hardware counts what its tensor cores did, the simulator multiplications and additions of mma and wgmma",
    },
    Definition {
        name: "tensor instructions",
        unit: "",
        hardware: &[&["sm__inst_executed_pipe_tensor.sum"], &["smsp__inst_executed_pipe_tensor.sum"]],
        simulator: Some(|counters| (counters.mma + counters.wgmma) as f64),
        difference: "one instruction of a kernel can be several of the machine",
    },
    Definition {
        name: "shared load wavefronts",
        unit: "",
        hardware: &[&["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"]],
        simulator: Some(|counters| (counters.shared_loads.transactions + counters.load_matrix.transactions) as f64),
        difference: "loads wait for banks that copies write to, and are tried again",
    },
    Definition {
        name: "shared store wavefronts",
        unit: "",
        hardware: &[&["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"]],
        simulator: Some(|counters| (counters.shared_stores.transactions + counters.store_matrix.transactions) as f64),
        difference: "bulk stores do not pass the store unit, and stores wait for banks that copies write to",
    },
    Definition {
        name: "shared wavefronts",
        unit: "",
        hardware: &[&["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"]],
        // On an H200 what cp.async writes is not among them.
        simulator: Some(|counters| (counters.shared().transactions - counters.copy_async_writes.transactions) as f64),
        difference: "the pipe also serves shuffles, and the operands that wgmma takes from shared memory",
    },
    Definition {
        name: "shared requests",
        unit: "",
        hardware: &[],
        simulator: Some(|counters| counters.shared().requests as f64),
        difference: "",
    },
    Definition {
        name: "shared wavefronts per request",
        unit: "",
        hardware: &[],
        simulator: Some(Counters::transactions_per_request),
        difference: "",
    },
    Definition {
        name: "shared bank conflicts",
        unit: "",
        hardware: &[&["l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"]],
        simulator: Some(|counters| (counters.shared().transactions - counters.shared().requests) as f64),
        difference: "the hardware also counts waits for banks that copies and other warps use",
    },
    Definition {
        name: "global load sectors",
        unit: "",
        hardware: &[&[
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum",
            "l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_ldgsts.sum",
        ]],
        simulator: Some(|counters| counters.global_loads.sectors as f64),
        difference: "bulk and tensor copies do not pass the load unit",
    },
    Definition {
        name: "global load requests",
        unit: "",
        hardware: &[&[
            "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
            "l1tex__t_requests_pipe_lsu_mem_global_op_ldgsts.sum",
        ]],
        simulator: Some(|counters| counters.global_loads.requests as f64),
        difference: "bulk and tensor copies do not pass the load unit",
    },
    Definition {
        name: "global store sectors",
        unit: "",
        hardware: &[&["l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"]],
        simulator: Some(|counters| counters.global_stores.sectors as f64),
        difference: "bulk and tensor copies do not pass the load unit",
    },
    Definition {
        name: "instructions",
        unit: "",
        hardware: &[&["smsp__inst_executed.sum"], &["sm__inst_executed.sum"]],
        simulator: Some(|counters| counters.instructions_in_all() as f64),
        difference: "the simulator counts instructions of PTX, of which the compiler makes more or fewer of the machine",
    },
    Definition {
        name: "exponentials",
        unit: "",
        hardware: &[],
        simulator: Some(|counters| counters.exponentials as f64),
        difference: "",
    },
    Definition {
        name: "barriers",
        unit: "",
        hardware: &[],
        simulator: Some(|counters| counters.barriers as f64),
        difference: "",
    },
    hardware_only(
        "tensor pipe",
        "%",
        &[
            &["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"],
            &["sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"],
        ],
    ),
    hardware_only("exp pipe", "%", &[&["sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"]]),
    hardware_only("shared pipe", "%", &[&["l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed"]]),
    hardware_only("SM throughput", "%", &[&["sm__throughput.avg.pct_of_peak_sustained_elapsed"]]),
    hardware_only("warps active", "%", &[&["sm__warps_active.avg.pct_of_peak_sustained_active"]]),
    hardware_only("DRAM throughput", "%", &[&["dram__throughput.avg.pct_of_peak_sustained_elapsed"]]),
    hardware_only("DRAM bytes", "B", &[&["dram__bytes.sum"], &["dram__bytes_read.sum", "dram__bytes_write.sum"]]),
    hardware_only("L2 throughput", "%", &[&["lts__throughput.avg.pct_of_peak_sustained_elapsed"]]),
    // What SMs were given, whether by loads, cp.async or tensor copies.
    Definition {
        name: L2_READS,
        unit: "",
        hardware: &[&["l1tex__m_xbar2l1tex_read_sectors.sum"]],
        // What another CTA stores to shared memory comes the same way.
        simulator: Some(|counters| (counters.global_loads.sectors + counters.cluster_bytes / SECTOR_BYTES) as f64),
        difference: "the hardware also reads what the L1 cache had to give up, and not what it still had",
    },
    hardware_only(DRAM_READS, "", &[&["dram__sectors_read.sum"]]),
    // Of both: see `read_hit_rate`.
    hardware_only(L2_READ_HIT_RATE, "%", &[]),
    // Of what was looked up in the cache, by SMs and by one half of the cache in the other.
    hardware_only("L2 lookup hit rate", "%", &[&["lts__t_sector_op_read_hit_rate.pct"]]),
    hardware_only(
        "stall: long scoreboard",
        "warps",
        &[&["smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"]],
    ),
    hardware_only(
        "stall: short scoreboard",
        "warps",
        &[&["smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio"]],
    ),
    hardware_only("stall: barrier", "warps", &[&["smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"]]),
    hardware_only("stall: wait", "warps", &[&["smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"]]),
    hardware_only(
        "stall: math pipe",
        "warps",
        &[&["smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio"]],
    ),
    hardware_only(
        "stall: shared pipe",
        "warps",
        &[&["smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio"]],
    ),
    hardware_only("stall: warpgroup", "warps", &[&["smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio"]]),
    hardware_only(
        "stall: not selected",
        "warps",
        &[&["smsp__average_warps_issue_stalled_not_selected_per_issue_active.ratio"]],
    ),
    hardware_only(
        "stall: no instruction",
        "warps",
        &[&["smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio"]],
    ),
];

impl Definition {
    /// Every name that ncu may have for it.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.hardware.iter().flat_map(|names| names.iter().copied())
    }

    fn of_hardware(&self, counted: &BTreeMap<String, f64>) -> Option<f64> {
        self.hardware.iter().find_map(|names| {
            let found: Vec<f64> = names.iter().filter_map(|name| counted.get(*name).copied()).collect();
            (!found.is_empty()).then(|| found.iter().sum())
        })
    }
}

/// The metrics of a profile: what ncu counted by its own names, and what the simulator counted, times `factor`.
pub fn metrics(counted: &BTreeMap<String, f64>, simulated: Option<(&Counters, f64)>) -> Vec<Metric> {
    let mut metrics: Vec<Metric> = DEFINITIONS
        .iter()
        .map(|definition| {
            let hardware = definition.of_hardware(counted);
            let simulator = simulated.and_then(|(counters, factor)| {
                // A ratio is the same for one head and for all.
                let factor = if definition.name == "shared wavefronts per request" { 1.0 } else { factor };
                definition.simulator.map(|count| factor * count(counters))
            });
            Metric {
                name: definition.name.to_owned(),
                unit: definition.unit.to_owned(),
                difference: difference(definition, hardware, simulator),
                hardware,
                simulator,
                gate: None,
            }
        })
        .collect();
    ratio(&mut metrics, "sectors per request", "global load sectors", "global load requests");
    hardware_wavefronts_per_request(&mut metrics);
    read_hit_rate(&mut metrics);
    metrics.retain(|metric| metric.hardware.is_some() || metric.simulator.is_some());
    metrics
}

fn difference(definition: &Definition, hardware: Option<f64>, simulator: Option<f64>) -> Option<String> {
    let (hardware, simulator) = (hardware?, simulator?);
    let apart = if hardware == simulator { 0.0 } else { simulator / hardware - 1.0 };
    (apart.abs() > AGREEMENT).then(|| format!("{:+.1} %: {}", 100.0 * apart, definition.difference))
}

fn ratio(metrics: &mut Vec<Metric>, name: &str, over: &str, under: &str) {
    let find = |name: &str| metrics.iter().find(|metric| metric.name == name);
    let (Some(over), Some(under)) = (find(over), find(under)) else { return };
    let divide = |over: Option<f64>, under: Option<f64>| Some(over? / under.filter(|value| *value > 0.0)?);
    let (hardware, simulator) = (divide(over.hardware, under.hardware), divide(over.simulator, under.simulator));
    metrics.push(Metric {
        name: name.to_owned(),
        unit: String::new(),
        hardware,
        simulator,
        difference: None,
        gate: None,
    });
}

/// The hardware has no counter of requests as the banks see them; the simulator's, which follow from the program, stand in.
fn hardware_wavefronts_per_request(metrics: &mut [Metric]) {
    let find = |name: &str| metrics.iter().find(|metric| metric.name == name);
    let loads = find("shared load wavefronts").and_then(|metric| metric.hardware.zip(metric.simulator));
    let conflicts = find("shared bank conflicts").and_then(|metric| metric.hardware);
    let Some(((hardware, simulator), conflicts)) = loads.zip(conflicts) else { return };
    if simulator == 0.0 {
        return;
    }
    let per_request = if conflicts == 0.0 { 1.0 } else { hardware / simulator };
    if let Some(metric) = metrics.iter_mut().find(|metric| metric.name == "shared wavefronts per request") {
        metric.hardware = metric.simulator.map(|simulator| simulator * per_request);
    }
}

/// Of the sectors that SMs read, the part that did not have to come from memory.
///
/// Lookups in the cache say less. Of SMs that ask for the same sector at about the same time only one asks
/// the cache; one half of the cache looks up in the other what it has not got; and ncu counts lookups and hits in different
/// replays, which gave 107 % for a launch of 6 microseconds.
fn read_hit_rate(metrics: &mut [Metric]) {
    let hardware = |name: &str| metrics.iter().find(|metric| metric.name == name).and_then(|metric| metric.hardware);
    let (Some(reads), Some(missed)) = (hardware(L2_READS).filter(|reads| *reads > 0.0), hardware(DRAM_READS)) else {
        return;
    };
    if let Some(metric) = metrics.iter_mut().find(|metric| metric.name == L2_READ_HIT_RATE) {
        metric.hardware = Some(100.0 * (1.0 - missed / reads));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_names_that_are_there_count() {
        let counted: BTreeMap<String, f64> = [
            ("sm__inst_executed_pipe_tensor.sum", 7.0),
            ("dram__bytes_read.sum", 10.0),
            ("dram__bytes_write.sum", 5.0),
            ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", 16.0),
            ("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", 4.0),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        let counters = Counters { mma: 5, ..Counters::default() };
        let found = metrics(&counted, Some((&counters, 2.0)));
        let check = |name: &str, hardware: Option<f64>, simulator: Option<f64>| {
            let metric = found.iter().find(|metric| metric.name == name).expect("it is there");
            assert_eq!((metric.hardware, metric.simulator), (hardware, simulator), "{name}");
        };
        check("tensor instructions", Some(7.0), Some(10.0));
        check("DRAM bytes", Some(15.0), None);
        check("sectors per request", Some(4.0), None);
        let tensor = found.iter().find(|metric| metric.name == "tensor instructions").expect("it is there");
        assert_eq!(
            tensor.difference.as_deref(),
            Some("+42.9 %: one instruction of a kernel can be several of the machine")
        );
        assert!(!found.iter().any(|metric| metric.name == L2_READ_HIT_RATE), "nothing is known of it");
    }

    #[test]
    fn what_memory_did_not_have_to_give_is_a_hit() {
        let rate = |counted: &[(&str, f64)]| {
            let counted = counted.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
            let found = metrics(&counted, None);
            found.into_iter().find(|metric| metric.name == L2_READ_HIT_RATE).and_then(|metric| metric.hardware)
        };
        let reads = ("l1tex__m_xbar2l1tex_read_sectors.sum", 200.0);
        assert_eq!(rate(&[reads, ("dram__sectors_read.sum", 50.0)]), Some(75.0));
        assert_eq!(rate(&[reads]), None);
        assert_eq!(rate(&[("l1tex__m_xbar2l1tex_read_sectors.sum", 0.0), ("dram__sectors_read.sum", 5.0)]), None);
    }
}
