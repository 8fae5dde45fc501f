//! Tests of the counters.

use super::*;
use crate::events::record::{Exit, FirstStep, Hang, Phase, Why};

fn record(kind: Kind) -> Record {
    Record { number: Number(1), causes: Vec::new(), round: 1, restart: 0, node: None, kind, text: None }
}

fn completed() -> Kind {
    Kind::RoundCompleted { nodes: 2, workers: None, rank0: None, in_place: false }
}

fn exited(first: bool) -> Kind {
    let (role, exit, message) = ("r".into(), "SIGKILL".into(), String::new());
    let exit = Exit { rank: 1, local_rank: 1, role, pid: 7, exit, returncode: -9, message, first, counts: first };
    Kind::WorkerExited(Box::new(exit))
}

fn hang(kind: &str) -> Hang {
    Hang {
        kind: kind.to_owned(),
        certain: false,
        ranks: vec![3],
        group: None,
        seq: None,
        op: None,
        line: None,
        call: None,
        waiting: 7,
        still_ms: 183_000,
        limit_ms: Some(180_000),
        lines: Vec::new(),
    }
}

fn text(metrics: &Metrics) -> String {
    let mut out = OpenMetrics::default();
    metrics.write(&mut out, Instant::now());
    out.finish()
}

#[test]
fn a_recovery_is_counted_by_its_reason_its_time_and_its_longest_phases() {
    let begin = Instant::now();
    let mut metrics = Metrics::default();
    let phase = |stop, start| Kind::Phase(Phase { stop_us: stop, start_us: start, ..Phase::default() });
    for (at_ms, kind) in [
        (0, completed()),
        (1, phase(None, Some(5_000))),
        (1000, exited(true)),
        (1000, Kind::RoundBroken { why: Why::WorkerFailed }),
        (1100, Kind::RoundBroken { why: Why::NodeLost }),
        (1100, exited(false)),
        (3000, completed()),
        (3010, phase(Some(900_000), Some(20_000))),
        (3020, phase(Some(1_200_000), Some(10_000))),
        (3020, Kind::Phase(Phase { rendezvous_us: Some(86_400_000_000), ..Phase::default() })), // a spare
    ] {
        metrics.count("job", &record(kind), begin + Duration::from_millis(at_ms));
    }
    let text = text(&metrics);
    for line in [
        "elastic_rs_rounds_total{run=\"job\",why=\"first\"} 1",
        "elastic_rs_rounds_total{run=\"job\",why=\"worker.failed\"} 1",
        "elastic_rs_restarts_total{run=\"job\",cause=\"signal\"} 1",
        "elastic_rs_restarts_total{run=\"job\",cause=\"exit\"} 0",
        "elastic_rs_worker_exits_total{run=\"job\",kind=\"first\"} 1",
        "elastic_rs_worker_exits_total{run=\"job\",kind=\"consequence\"} 1",
        "elastic_rs_lost_seconds_total{run=\"job\",phase=\"stop\"} 1.2",
        "elastic_rs_lost_seconds_total{run=\"job\",phase=\"start\"} 0.02",
        "elastic_rs_lost_seconds_total{run=\"job\",phase=\"rendezvous\"} 2",
        "elastic_rs_recovery_seconds_bucket{run=\"job\",le=\"1.0\"} 0",
        "elastic_rs_recovery_seconds_bucket{run=\"job\",le=\"3.0\"} 1",
        "elastic_rs_recovery_seconds_bucket{run=\"job\",le=\"+Inf\"} 1",
        "elastic_rs_recovery_seconds_sum{run=\"job\"} 2",
        "elastic_rs_phase_seconds_bucket{run=\"job\",phase=\"stop\",le=\"1.0\"} 1",
        "elastic_rs_phase_seconds_count{run=\"job\",phase=\"start\"} 3",
        "elastic_rs_slowest_phase_seconds{run=\"job\",phase=\"start\"} 0.02",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}\n{text}");
    }
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn a_lost_nodes_silence_and_the_first_step_are_parts_of_a_recovery() {
    let begin = Instant::now();
    let mut metrics = Metrics::default();
    let lost = |number, silent_ms| Record {
        number: Number(number),
        ..record(Kind::NodeLost { how: Loss::Silence, silent_ms: Some(silent_ms) })
    };
    let broken = Record { causes: vec![Number(8)], ..record(Kind::RoundBroken { why: Why::NodeLost }) };
    let step = |micros| record(Kind::FirstStep(FirstStep { first_step_us: micros, ..FirstStep::default() }));
    for event in [
        record(completed()),
        step(9_000_000), // of the first round, which recovers nothing
        lost(7, 99_000), // it had no place
        lost(8, 15_000),
        broken,
        lost(9, 16_000),
        record(completed()),
        step(400_000),
        step(500_000),
    ] {
        metrics.count("job", &event, begin);
    }
    let text = text(&metrics);
    for line in ["phase=\"detect\"} 16", "phase=\"first_step\"} 0.5"] {
        assert!(text.contains(&format!("elastic_rs_lost_seconds_total{{run=\"job\",{line}\n")), "{line}\n{text}");
    }
}

#[test]
fn the_number_of_series_is_bounded_and_names_cannot_forge_lines() {
    let mut metrics = Metrics::default();
    let lost = || record(Kind::NodeLost { how: Loss::Silence, silent_ms: None });
    for run in 0..1000 {
        metrics.count(&format!("run{run:04}"), &lost(), Instant::now());
    }
    assert_eq!(metrics.runs.len(), RUNS);
    let line = format!("elastic_rs_nodes_lost_total{{run=\"other\",how=\"silence\"}} {}", 1000 - RUNS);
    assert!(text(&metrics).lines().any(|it| it == line));
    let mut metrics = Metrics::default();
    for run in 0..=RUNS {
        metrics.count(&run.to_string(), &record(exited(true)), Instant::now());
    }
    assert!(text(&metrics).contains("elastic_rs_worker_exits_total{run=\"other\",kind=\"first\"} 1\n"));
    let mut metrics = Metrics::default();
    metrics.count("a\"} 1\n\\", &lost(), Instant::now());
    let text = text(&metrics);
    assert!(text.contains("{run=\"a\\\"} 1\\n\\\\\",how=\"silence\"} 1\n"), "{text}");
}

#[test]
fn hangs_are_counted_by_kind_once_they_are_found() {
    let mut metrics = Metrics::default();
    for kind in ["not_entered", "stopped", "not_entered"] {
        metrics.count("job", &record(Kind::HangWaits(Box::new(hang(kind)))), Instant::now());
        metrics.count("job", &record(Kind::HangFound(Box::new(hang(kind)))), Instant::now());
        metrics.count("job", &record(Kind::HangOver { still_ms: 200_000 }), Instant::now());
    }
    let written = text(&metrics);
    let counts: Vec<_> = written.lines().filter(|line| line.starts_with("elastic_rs_hangs_total")).collect();
    let job = |kind, count| format!("elastic_rs_hangs_total{{run=\"job\",kind=\"{kind}\"}} {count}");
    assert_eq!(counts, [job("not_entered", 2), job("stopped", 1)]);
    // The time without a step is lost, once the workers are restarted because of it.
    let lost = |metrics: &Metrics| {
        text(metrics)
            .lines()
            .find(|line| line.contains("lost_seconds_total") && line.contains("detect"))
            .map(str::to_owned)
    };
    metrics.count("job", &record(completed()), Instant::now());
    assert!(lost(&metrics).unwrap().ends_with(" 0"));
    metrics.count("job", &record(Kind::HangFound(Box::new(hang("stopped")))), Instant::now());
    let broken = Record { causes: vec![Number(1)], ..record(Kind::RoundBroken { why: Why::HangFound }) };
    metrics.count("job", &broken, Instant::now());
    metrics.count("job", &record(completed()), Instant::now());
    assert!(lost(&metrics).unwrap().ends_with(" 183"));
}

/// Those of the run's state, which are not counted here, are 16 at most.
#[test]
fn a_run_that_has_seen_everything_has_at_most_165_series() {
    let mut metrics = Metrics::default();
    let all = Some(1_000);
    let phase = Phase { detect_us: all, stop_us: all, rendezvous_us: all, start_us: all, import_us: all };
    for why in Why::ALL {
        for kind in [
            completed(),
            Kind::Phase(phase),
            Kind::FirstStep(FirstStep { first_step_us: 1_000, ..FirstStep::default() }),
            Kind::RoundBroken { why },
        ] {
            metrics.count("job", &record(kind), Instant::now());
        }
    }
    for kind in [completed(), Kind::RoundChanges {}, completed(), Kind::Phase(phase)] {
        metrics.count("job", &record(kind), Instant::now());
    }
    for number in 0..13 {
        metrics.count("job", &record(Kind::HangFound(Box::new(hang(&number.to_string())))), Instant::now());
    }
    let text = text(&metrics);
    let series = text.lines().filter(|line| line.contains("{run=\"job\"")).count();
    assert!((100..=149).contains(&series), "{series}\n{text}");
}

#[test]
fn what_is_only_counted_has_bounded_labels_and_names_no_unknown_run() {
    let (mut metrics, begin) = (Metrics::default(), Instant::now());
    metrics.count("job", &record(completed()), begin);
    for why in Refused::ALL {
        metrics.tally("job", Tally::Refused(why));
    }
    metrics.tally("job", Tally::Refused(Refused::Settings));
    metrics.tally("job", Tally::Fenced);
    for number in 0..200 {
        metrics.tally(&format!("stranger{number}"), Tally::Refused(Refused::Invalid));
    }
    for micros in [250, 900, u64::MAX] {
        metrics.tally("job", Tally::RoundTrip(Duration::from_micros(micros)));
    }
    let text = text(&metrics);
    for line in [
        "elastic_rs_node_refusals_total{run=\"job\",why=\"settings\"} 2",
        "elastic_rs_node_refusals_total{run=\"job\",why=\"flapping\"} 1",
        "elastic_rs_node_refusals_total{run=\"other\",why=\"invalid\"} 200",
        "elastic_rs_fences_total{run=\"job\"} 1",
        "elastic_rs_heartbeat_rtt_seconds_bucket{le=\"0.0003\"} 1",
        "elastic_rs_heartbeat_rtt_seconds_bucket{le=\"0.001\"} 2",
        "elastic_rs_heartbeat_rtt_seconds_bucket{le=\"10.0\"} 2",
        "elastic_rs_heartbeat_rtt_seconds_count 3",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}\n{text}");
    }
    assert!(!text.contains("stranger"), "{text}");
}
