//! Who a container runs as: `USER[:GROUP]` against the image's own `/etc/passwd` and `/etc/group`.
//!
//! Pure: the files come in as bytes of an image, so they are hostile; lines that do not parse are skipped, and only
//! as much is read as was handed in.

/// The outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// Supplementary groups, sorted.
    pub groups: Vec<u32>,
    /// Home directory, `/` when unknown.
    pub home: String,
}

/// Why a user cannot be resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UserError {
    /// No such name.
    #[error("no user {0:?} in the image's /etc/passwd; use a number or another name with -u")]
    NoUser(String),
    /// No such group.
    #[error("no group {0:?} in the image's /etc/group; use a number or another name with -u USER:GROUP")]
    NoGroup(String),
    /// Neither a name nor a number.
    #[error("{0:?} is not USER or USER:GROUP")]
    Form(String),
}

/// A number that the kernel takes for an id.
fn id(text: &str) -> Option<u32> {
    text.parse::<u32>().ok().filter(|_| !text.starts_with('+')).filter(|n| *n < u32::MAX)
}

/// The colon-separated fields of each line that is text.
fn rows(file: &[u8]) -> impl Iterator<Item = Vec<&str>> {
    file.split(|b| *b == b'\n').filter_map(|line| {
        let line = std::str::from_utf8(line).ok()?.trim_end_matches('\r');
        if line.is_empty() || line.starts_with('#') { None } else { Some(line.split(':').collect()) }
    })
}

/// Resolves `spec` (empty: root) in the bytes of the image's files.
pub fn resolve(spec: &str, passwd: &[u8], group: &[u8]) -> Result<User, UserError> {
    let (user, wanted_group) = match spec.split_once(':') {
        Some((u, g)) if !g.is_empty() && !g.contains(':') => (u, Some(g)),
        Some(_) => return Err(UserError::Form(spec.to_owned())),
        None => (spec, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    // A name that happens to be a number is found by name first, as docker does.
    let known = rows(passwd)
        .filter(|f| f.len() >= 6 && id(f[2]).is_some() && id(f[3]).is_some())
        .find(|f| f[0] == user || id(user).is_some_and(|n| id(f[2]) == Some(n)));
    let (uid, gid, home, name) = match &known {
        Some(f) => (id(f[2]).unwrap_or(0), id(f[3]).unwrap_or(0), f[5], Some(f[0])),
        None => match id(user) {
            Some(uid) => (uid, 0, "/", None),
            None => return Err(UserError::NoUser(user.to_owned())),
        },
    };
    let home = if home.starts_with('/') { home.to_owned() } else { "/".to_owned() };
    let groups_of = || rows(group).filter(|f| f.len() >= 3).filter_map(|f| Some((f[0], id(f[2])?, f.get(3).copied())));
    if let Some(wanted) = wanted_group {
        let gid = groups_of()
            .find(|(n, _, _)| *n == wanted)
            .map(|(_, g, _)| g)
            .or_else(|| id(wanted))
            .ok_or_else(|| UserError::NoGroup(wanted.to_owned()))?;
        return Ok(User { uid, gid, groups: Vec::new(), home });
    }
    let mut groups: Vec<u32> = match name {
        Some(name) => groups_of()
            .filter(|(_, _, members)| members.is_some_and(|m| m.split(',').any(|m| m == name)))
            .map(|(_, g, _)| g)
            .filter(|g| *g != gid)
            .collect(),
        None => Vec::new(),
    };
    groups.sort_unstable();
    groups.dedup();
    // The kernel's own limit; an image cannot make it more.
    groups.truncate(65_536);
    Ok(User { uid, gid, groups, home })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] =
        b"root:x:0:0:root:/root:/bin/sh\n# comment\n\xff\xfe:x:9:9::/:\nbroken:x\nweb:x:33:34::/var/www:/bin/false\r\n\
        7:x:70:71::/seven:\nodd:x:notanumber:1::/:\nrel:x:5:5::home:\n";
    const GROUP: &[u8] =
        b"root:x:0:\nwww:x:34:\nlogs:x:4:other,web\naudio:x:29:web\nweb2:x:34:web\nlogs2:x:4:web\nbad:x:zz:web\n";

    #[test]
    fn users_resolve_in_the_image() {
        let user =
            |uid, gid, groups: &[u32], home: &str| Ok(User { uid, gid, groups: groups.to_vec(), home: home.into() });
        let table = [
            ("", user(0, 0, &[], "/root")),
            ("root", user(0, 0, &[], "/root")),
            ("web", user(33, 34, &[4, 29], "/var/www")),
            ("33", user(33, 34, &[4, 29], "/var/www")),
            ("web:logs", user(33, 4, &[], "/var/www")),
            ("web:1234", user(33, 1234, &[], "/var/www")),
            ("1000", user(1000, 0, &[], "/")),
            ("1000:1000", user(1000, 1000, &[], "/")),
            ("7", user(70, 71, &[], "/seven")),
            (":logs", user(0, 4, &[], "/root")),
            ("rel", user(5, 5, &[], "/")),
            ("nobody", Err(UserError::NoUser("nobody".into()))),
            ("odd", Err(UserError::NoUser("odd".into()))),
            ("web:nogroup", Err(UserError::NoGroup("nogroup".into()))),
            ("web:", Err(UserError::Form("web:".into()))),
            ("a:b:c", Err(UserError::Form("a:b:c".into()))),
            ("-1", Err(UserError::NoUser("-1".into()))),
            ("4294967295", Err(UserError::NoUser("4294967295".into()))),
            ("+5", Err(UserError::NoUser("+5".into()))),
        ];
        for (spec, want) in table {
            assert_eq!(resolve(spec, PASSWD, GROUP), want, "{spec:?}");
        }
    }

    #[test]
    fn an_image_without_the_files_has_root() {
        assert_eq!(resolve("", b"", b""), Ok(User { uid: 0, gid: 0, groups: vec![], home: "/".into() }));
        assert!(resolve("root", b"", b"").is_err());
    }
}
