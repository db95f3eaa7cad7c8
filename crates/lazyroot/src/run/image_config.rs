//! The part of an OCI image configuration that `run` uses. Fields of the wrong type count as absent: an odd
//! configuration must not keep anybody from running a command of their own.

use serde_json::Value;
use std::collections::BTreeMap;

/// What an image says about running it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageConfig {
    /// Always there, in front.
    pub entrypoint: Vec<String>,
    /// Unless the user gives something else.
    pub cmd: Vec<String>,
    /// `KEY=VALUE`.
    pub env: Vec<String>,
    /// `USER[:GROUP]`.
    pub user: String,
    /// Working directory.
    pub workdir: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Volumes that the image declares.
    pub volumes: Vec<String>,
}

fn strings(value: Option<&Value>) -> Vec<String> {
    let list = value.and_then(Value::as_array);
    list.map(|l| l.iter().filter_map(Value::as_str).map(str::to_owned).collect()).unwrap_or_default()
}

impl ImageConfig {
    /// From an image configuration (`{"config": {…}}`), or null.
    pub fn from_json(image: &Value) -> ImageConfig {
        let config = &image["config"];
        let text = |key: &str| config[key].as_str().unwrap_or_default().to_owned();
        let labels = config["Labels"].as_object().into_iter().flatten();
        ImageConfig {
            entrypoint: strings(config.get("Entrypoint")),
            cmd: strings(config.get("Cmd")),
            env: strings(config.get("Env")),
            user: text("User"),
            workdir: text("WorkingDir"),
            labels: labels.filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned()))).collect(),
            volumes: config["Volumes"].as_object().map(|v| v.keys().cloned().collect()).unwrap_or_default(),
        }
    }

    /// The command line: what the user gave, completed from the image.
    pub fn command(&self, entrypoint: Option<&str>, args: &[String]) -> Vec<String> {
        let (mut line, own_entry) = match entrypoint {
            Some("") => (Vec::new(), true),
            Some(command) => (vec![command.to_owned()], true),
            None => (self.entrypoint.clone(), false),
        };
        if !args.is_empty() {
            line.extend_from_slice(args);
        } else if !own_entry {
            line.extend_from_slice(&self.cmd);
        }
        line
    }
}

/// Merges environments: later ones replace earlier ones of the same key, in place. `KEY` alone takes the caller's
/// value, or removes it when the caller has none.
pub fn merge_env(
    base: &[String],
    extra: &[String],
    caller: impl Fn(&str) -> Option<String>,
) -> Result<Vec<String>, String> {
    let mut out: Vec<String> = Vec::new();
    let put = |out: &mut Vec<String>, key: &str, value: Option<&str>| {
        let place = out.iter().position(|e| e.split('=').next() == Some(key));
        match (place, value) {
            (Some(i), Some(v)) => out[i] = format!("{key}={v}"),
            (Some(i), None) => drop(out.remove(i)),
            (None, Some(v)) => out.push(format!("{key}={v}")),
            (None, None) => {}
        }
    };
    for entry in base {
        if let Some((key, value)) = entry.split_once('=').filter(|(k, _)| !k.is_empty()) {
            put(&mut out, key, Some(value));
        }
    }
    for entry in extra {
        match entry.split_once('=') {
            Some(("", _)) => return Err(format!("-e {entry}: the name is missing")),
            Some((key, value)) => put(&mut out, key, Some(value)),
            None if entry.is_empty() => return Err("-e: the name is missing".to_owned()),
            None => put(&mut out, entry, caller(entry).as_deref()),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn odd_configurations_are_read_as_far_as_they_go() {
        assert_eq!(ImageConfig::from_json(&Value::Null), ImageConfig::default());
        let odd = json!({"config": {"Entrypoint": "sh", "Cmd": ["a", 1, "b"], "Env": null, "User": 7, "Labels": {"a": "b", "c": 1},
            "Volumes": {"/data": {}}}});
        let config = ImageConfig::from_json(&odd);
        assert_eq!(config.cmd, ["a", "b"]);
        assert_eq!((config.entrypoint.len(), config.user.as_str()), (0, ""));
        assert_eq!(config.labels.into_iter().collect::<Vec<_>>(), [("a".to_owned(), "b".to_owned())]);
        assert_eq!(config.volumes, ["/data"]);
    }

    #[test]
    fn commands_are_completed_as_docker_does() {
        let config = ImageConfig { entrypoint: vec!["e".into()], cmd: vec!["c".into()], ..Default::default() };
        let args = |s: &str| s.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let table = [
            (None, "", "e c"),
            (None, "x y", "e x y"),
            (Some("o"), "", "o"),
            (Some("o"), "x", "o x"),
            (Some(""), "x", "x"),
            (Some(""), "", ""),
        ];
        for (entry, given, want) in table {
            assert_eq!(config.command(entry, &args(given)), args(want), "{entry:?} {given:?}");
        }
    }

    #[test]
    fn environments_merge() {
        let s = |l: &[&str]| l.iter().map(|s| s.to_string()).collect::<Vec<_>>();
        let caller = |k: &str| (k == "HOST").then(|| "here".to_owned());
        let got = merge_env(&s(&["A=1", "B=2", "A=3", "=x", "C"]), &s(&["B=4=5", "HOST", "A", "N="]), caller).unwrap();
        assert_eq!(got, ["B=4=5", "HOST=here", "N="]);
        assert!(merge_env(&[], &s(&["=x"]), caller).is_err());
        assert!(merge_env(&[], &s(&[""]), caller).is_err());
    }
}
