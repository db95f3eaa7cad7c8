//! Documentation that points at files: each relative link leads to something.

use crate::report::Tally;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Checks every Markdown file of the repository.
pub fn run(tally: &mut Tally) -> Result<()> {
    let mut files = Vec::new();
    collect(crate::repository(), &mut files)?;
    files.sort();
    for file in files {
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let dir = file.parent().unwrap_or(Path::new("."));
        let dead: Vec<&str> = targets(&text).filter(|target| !dir.join(target).exists()).collect();
        let name = file.strip_prefix(crate::repository()).unwrap_or(&file).display().to_string();
        if dead.is_empty() {
            tally.pass(1);
        } else {
            tally.fail(name, format!("dead links: {}", dead.join(" ")));
        }
    }
    Ok(())
}

fn collect(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type()?.is_dir() {
            // Dot directories but .ci are no place for documentation; target is not ours.
            if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                collect(&entry.path(), files)?;
            }
        } else if entry.path().extension().is_some_and(|e| e == "md") {
            files.push(entry.path());
        }
    }
    Ok(())
}

/// Relative targets of `[text](target)`, without what follows a `#`.
fn targets(text: &str) -> impl Iterator<Item = &str> {
    let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    let relative = links.map(|(target, _)| target).filter(|t| !t.contains("://") && !t.contains(char::is_whitespace));
    relative.map(|t| t.split('#').next().unwrap_or(t)).filter(|t| !t.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_relative_targets_are_followed() {
        let text = "[a](x.md) [b](https://e.org/) [c](#here) [d](y.md#there) `f[1](two words)`";
        assert_eq!(targets(text).collect::<Vec<_>>(), ["x.md", "y.md"]);
    }
}
