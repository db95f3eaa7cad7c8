//! Series of values, taken in turn, and what is said about them.

use anyhow::Result;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Values of one thing on one target, one for each round.
#[derive(Debug, Clone)]
pub struct Series {
    /// What was measured.
    pub what: String,
    /// On what.
    pub target: String,
    /// In which unit.
    pub unit: &'static str,
    /// The values.
    pub values: Vec<f64>,
}

impl Series {
    /// An empty series.
    pub fn new(what: impl Into<String>, target: impl Into<String>, unit: &'static str) -> Self {
        Series { what: what.into(), target: target.into(), unit, values: Vec::new() }
    }

    /// The middle value.
    pub fn median(&self) -> f64 {
        median(&self.values)
    }

    /// The median of the ratios to `base`, round by round.
    pub fn ratio(&self, base: &Series) -> f64 {
        let ratios: Vec<f64> = self.values.iter().zip(&base.values).map(|(a, b)| a / b).collect();
        median(&ratios)
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// One target's way to produce a value.
pub type Measured<'a> = Box<dyn FnMut() -> Result<f64> + 'a>;

/// Runs all targets in turn, `rounds` times: A B C, A B C, …
pub fn in_turn(
    what: &str,
    unit: &'static str,
    rounds: usize,
    targets: Vec<(String, Measured<'_>)>,
) -> Result<Vec<Series>> {
    let mut series: Vec<Series> = targets.iter().map(|(target, _)| Series::new(what, target, unit)).collect();
    let mut targets = targets;
    for _ in 0..rounds.max(1) {
        for ((_, measure), series) in targets.iter_mut().zip(&mut series) {
            series.values.push(measure()?);
        }
    }
    Ok(series)
}

/// What one run of a benchmark found.
#[derive(Debug)]
pub struct Figures {
    name: String,
    begun: Value,
    rows: Vec<Value>,
    goals: Vec<Value>,
    peers: serde_json::Map<String, Value>,
}

impl Figures {
    /// Nothing yet.
    pub fn new(name: &str) -> Self {
        let begun = super::surroundings();
        Figures { name: name.into(), begun, rows: Vec::new(), goals: Vec::new(), peers: serde_json::Map::new() }
    }

    /// Takes in series of one thing, with ratios to the first of them.
    pub fn add(&mut self, series: &[Series]) {
        let Some(base) = series.first() else { return };
        println!("{} ({}), ratio to {}", base.what, base.unit, base.target);
        for one in series {
            let ratio = one.ratio(base);
            let mut line = format!("  {:<44} {:>12}", one.target, digits(one.median()));
            if series.len() > 1 {
                let _ = write!(line, "  ({ratio:.2})");
            }
            println!("{line}");
            self.rows.push(json!({
                "what": one.what, "target": one.target, "unit": one.unit, "values": one.values,
                "median": one.median(), "ratio": ratio, "ratio_to": base.target,
            }));
        }
    }

    /// Compares a value with what it should be at most.
    pub fn goal(&mut self, what: impl Into<String>, value: f64, most: f64) {
        let (what, met) = (what.into(), value <= most);
        println!(
            "  {} {what}: {}, goal at most {}",
            if met { "met   " } else { "MISSED" },
            digits(value),
            digits(most)
        );
        self.goals.push(json!({"what": what, "value": value, "most": most, "met": met}));
    }

    /// Notes a peer's version, or that it is absent.
    pub fn peer(&mut self, name: &str, version: Option<String>) {
        if version.is_none() {
            println!("  absent: {name}");
        }
        self.peers.insert(name.into(), version.map_or(json!("absent"), Value::from));
    }

    /// Notes that something that is here could not be measured.
    pub fn unmeasured(&mut self, what: &str, why: &anyhow::Error) {
        println!("  could not be measured: {what}: {why:#}");
        self.peers.insert(what.into(), Value::from(format!("could not be measured: {why:#}")));
    }

    /// Everything.
    pub fn json(&self) -> Value {
        json!({
            "bench": self.name, "begun": self.begun, "ended": super::surroundings(),
            "peers": self.peers, "rows": self.rows, "goals": self.goals,
        })
    }
}

/// Three significant digits.
fn digits(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        v if v >= 1.0 => format!("{value:.2}"),
        v if v >= 0.1 => format!("{value:.3}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_taken_round_by_round() {
        let series = |values: &[f64]| Series { values: values.to_vec(), ..Series::new("w", "t", "s") };
        let (slow, fast) = (series(&[2.0, 20.0, 6.0]), series(&[1.0, 10.0, 2.0]));
        assert_eq!(slow.ratio(&fast), 2.0);
        assert_eq!(slow.median(), 6.0);
        assert_eq!(median(&[1.0, 3.0]), 2.0);
    }

    #[test]
    fn targets_run_in_turn() {
        let order = std::cell::RefCell::new(Vec::new());
        let target = |name: &'static str| -> (String, Measured<'_>) {
            let order = &order;
            let measure = move || {
                order.borrow_mut().push(name);
                Ok(1.0)
            };
            (name.to_owned(), Box::new(measure))
        };
        let series = in_turn("w", "s", 2, vec![target("a"), target("b")]).expect("nothing fails");
        assert_eq!(*order.borrow(), ["a", "b", "a", "b"]);
        assert_eq!(series[1].values.len(), 2);
    }
}
