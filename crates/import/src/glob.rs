//! Globs for `--include` and `--exclude`, matched component by component while a tree is walked.
//!
//! `*` and `?` stay within a component, `[a-z]` and `[!a-z]` are one byte, `\` takes the next character as it is,
//! `**` as a whole component is any number of components. A pattern with a slash at its start or inside is anchored
//! at the source's root; any other matches at every depth. A slash at the end matches directories only. Names are
//! bytes. Time is linear in the path for each pattern.

/// Components of one pattern.
const MAX_COMPONENTS: usize = 60;

/// A list of patterns.
#[derive(Debug, Default)]
pub(crate) struct Patterns(Vec<Pattern>);

#[derive(Debug)]
struct Pattern {
    components: Vec<Component>,
    directories_only: bool,
}

#[derive(Debug)]
enum Component {
    AnyDepth,
    Name(Vec<Token>),
}

#[derive(Debug)]
enum Token {
    Byte(u8),
    Any,
    Star,
    Class { negated: bool, ranges: Vec<(u8, u8)> },
}

/// How far each pattern has matched a path: bit i says that the first i components have.
#[derive(Debug, Clone)]
pub(crate) struct State(Box<[u64]>);

impl Patterns {
    /// Reads patterns; the error says what is wrong with which.
    pub(crate) fn parse(texts: &[String]) -> Result<Patterns, String> {
        let list = texts.iter().map(|t| Pattern::parse(t.as_bytes()).map_err(|why| format!("pattern {t:?}: {why}")));
        list.collect::<Result<_, _>>().map(Patterns)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The state at the root.
    pub(crate) fn start(&self) -> State {
        State(self.0.iter().map(|p| p.close(1)).collect())
    }

    /// The state one component below.
    pub(crate) fn step(&self, state: &State, name: &[u8]) -> State {
        State(self.0.iter().zip(&state.0).map(|(p, &s)| p.step(s, name)).collect())
    }

    /// Whether the path that led to `state` matches a pattern.
    pub(crate) fn hit(&self, state: &State, is_dir: bool) -> bool {
        let full = |(p, &s): (&Pattern, &u64)| s >> p.components.len() & 1 == 1 && (is_dir || !p.directories_only);
        self.0.iter().zip(&state.0).any(full)
    }

    /// Whether something below that path may match.
    pub(crate) fn open(&self, state: &State) -> bool {
        self.0.iter().zip(&state.0).any(|(p, &s)| s & ((1 << p.components.len()) - 1) != 0)
    }
}

impl Pattern {
    fn parse(text: &[u8]) -> Result<Pattern, &'static str> {
        let directories_only = text.ends_with(b"/");
        let trimmed = text.strip_suffix(b"/").unwrap_or(text);
        let mut components = Vec::new();
        if !trimmed.contains(&b'/') {
            components.push(Component::AnyDepth);
        }
        for part in trimmed.split(|&b| b == b'/').filter(|p| !p.is_empty() && *p != b".") {
            components.push(match part {
                b"**" => Component::AnyDepth,
                b".." => return Err("'..' has no meaning in a pattern"),
                _ => Component::Name(tokens(part)?),
            });
        }
        if !components.iter().any(|c| matches!(c, Component::Name(_))) && !trimmed.starts_with(b"**") {
            return Err("it names nothing");
        }
        if components.len() > MAX_COMPONENTS {
            return Err("it has too many components");
        }
        Ok(Pattern { components, directories_only })
    }

    /// `**` may also match nothing.
    fn close(&self, mut state: u64) -> u64 {
        for (i, c) in self.components.iter().enumerate() {
            if matches!(c, Component::AnyDepth) && state >> i & 1 == 1 {
                state |= 1 << (i + 1);
            }
        }
        state
    }

    fn step(&self, state: u64, name: &[u8]) -> u64 {
        let mut next = 0;
        for (i, c) in self.components.iter().enumerate() {
            if state >> i & 1 == 1 {
                match c {
                    Component::AnyDepth => next |= 1 << i,
                    Component::Name(tokens) if name_matches(tokens, name) => next |= 1 << (i + 1),
                    Component::Name(_) => {}
                }
            }
        }
        self.close(next)
    }
}

fn tokens(part: &[u8]) -> Result<Vec<Token>, &'static str> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < part.len() {
        let b = part[at];
        at += 1;
        match b {
            b'*' => {
                if !matches!(out.last(), Some(Token::Star)) {
                    out.push(Token::Star);
                }
            }
            b'?' => out.push(Token::Any),
            b'\\' => {
                out.push(Token::Byte(*part.get(at).ok_or("it ends in a backslash")?));
                at += 1;
            }
            b'[' => {
                let negated = matches!(part.get(at), Some(b'!' | b'^'));
                at += usize::from(negated);
                let mut ranges = Vec::new();
                loop {
                    let low = *part.get(at).ok_or("a '[' is not closed")?;
                    at += 1;
                    if low == b']' && !ranges.is_empty() {
                        break;
                    }
                    match (part.get(at), part.get(at + 1)) {
                        (Some(b'-'), Some(&high)) if high != b']' => {
                            ranges.push((low, high));
                            at += 2;
                        }
                        _ => ranges.push((low, low)),
                    }
                }
                out.push(Token::Class { negated, ranges });
            }
            other => out.push(Token::Byte(other)),
        }
    }
    Ok(out)
}

/// Matches a whole name; a star goes back to itself only, so this is at worst quadratic in a name.
fn name_matches(tokens: &[Token], name: &[u8]) -> bool {
    let (mut t, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        let one = match tokens.get(t) {
            Some(Token::Star) => {
                star = Some((t, n));
                t += 1;
                continue;
            }
            Some(Token::Byte(b)) => *b == name[n],
            Some(Token::Any) => true,
            Some(Token::Class { negated, ranges }) => {
                ranges.iter().any(|&(low, high)| (low..=high).contains(&name[n])) != *negated
            }
            None => false,
        };
        match (one, star) {
            (true, _) => (t, n) = (t + 1, n + 1),
            (false, Some((at, from))) => {
                (t, n) = (at + 1, from + 1);
                star = Some((at, from + 1));
            }
            (false, None) => return false,
        }
    }
    tokens[t..].iter().all(|t| matches!(t, Token::Star))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(patterns: &Patterns, path: &str) -> State {
        path.split('/').filter(|p| !p.is_empty()).fold(patterns.start(), |s, p| patterns.step(&s, p.as_bytes()))
    }

    #[test]
    fn patterns_match() {
        // pattern, path, whether it hits as a file, as a directory, whether something below may.
        let table = [
            ("/etc", "etc", true, true, false),
            ("/etc", "usr/etc", false, false, false),
            ("etc", "usr/etc", true, true, true),
            ("/usr/lib", "usr", false, false, true),
            ("/usr/lib", "usr/lib", true, true, false),
            ("/usr/lib", "var", false, false, false),
            ("usr/lib", "usr/lib", true, true, false),
            ("usr/lib", "x/usr/lib", false, false, false),
            ("*.o", "a/b/c.o", true, true, true),
            ("*.o", "a/b/c.ob", false, false, true),
            ("/a/*/c", "a/b/c", true, true, false),
            ("/a/*/c", "a/b/x/c", false, false, false),
            ("/a/**/c", "a/c", true, true, true),
            ("/a/**/c", "a/b/x/c", true, true, true),
            ("**/c", "c", true, true, true),
            ("**", "any/thing", true, true, true),
            ("/a/**", "a", true, true, true),
            ("cache/", "a/cache", false, true, true),
            ("/s?adow-[!a-c]", "shadow-d", true, true, false),
            ("/s?adow-[!a-c]", "shadow-b", false, false, false),
            ("[]x]", "]", true, true, true),
            ("[a-]", "-", true, true, true),
            ("\\*", "*", true, true, true),
            ("\\*", "x", false, false, true),
            ("*a*b*c", "xaxbxbxc", true, true, true),
            ("*a*b*c", "xaxcxb", false, false, true),
        ];
        for (pattern, path, file, dir, open) in table {
            let p = Patterns::parse(&[pattern.into()]).unwrap();
            let s = at(&p, path);
            assert_eq!((p.hit(&s, false), p.hit(&s, true), p.open(&s)), (file, dir, open), "{pattern} {path}");
        }
        for bad in ["", "/", ".", "a/../b", "[a", "x\\"] {
            assert!(Patterns::parse(&[bad.into()]).is_err(), "{bad}");
        }
    }
}
