//! Names of images, and what the store remembers about each: one small file per name in `refs/`.
//!
//! A name's file name is the name itself with `/` as `+`, `:` (before a port) as `=`, and `@` before the tag: characters
//! that names cannot hold, so the mapping can be undone and no name leaves the directory. A record repeats its name,
//! so a file that was moved is noticed; and it carries a digest of itself, so that one that says something else than what
//! was written is an error, and neither gives a wrong config nor lets `gc` remove what the right one names.

use crate::{ObjectId, StoreError, layout};
use format::Digest;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

/// `NAME[:TAG]`, checked: a name of one or more parts, separated by `/`, of letters, digits, `.`, `_` and `-`, each
/// starting and ending with a letter or digit; the first may end in a port (`localhost:5000/app`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName {
    name: String,
    tag: String,
}

impl ImageName {
    /// The tag of a name without one.
    pub const DEFAULT_TAG: &'static str = "latest";
    /// The most bytes of a tag.
    pub const MAX_TAG: usize = 128;
    /// The most bytes of a name and its tag: they must fit a file name.
    pub const MAX_LEN: usize = 240;

    const SUFFIX: &'static str = ".json";

    /// Reads `NAME[:TAG]`.
    ///
    /// # Errors
    /// [`StoreError::BadName`].
    pub fn parse(text: &str) -> Result<ImageName, StoreError> {
        let last_part = text.rfind('/').map_or(0, |p| p + 1);
        let (name, tag) = match text[last_part..].find(':') {
            Some(p) => (&text[..last_part + p], &text[last_part + p + 1..]),
            None => (text, Self::DEFAULT_TAG),
        };
        match Self::why_bad(name, tag) {
            None => Ok(ImageName { name: name.into(), tag: tag.into() }),
            Some(why) => Err(StoreError::BadName { name: text.chars().take(300).collect(), why }),
        }
    }

    fn why_bad(name: &str, tag: &str) -> Option<&'static str> {
        let word = |w: &str| w.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        let inner = |w: &str| {
            let end = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
            end(w.as_bytes().first()) && end(w.as_bytes().last())
        };
        if name.len() + tag.len() > Self::MAX_LEN {
            return Some("too long, at most 240 bytes");
        }
        if name.is_empty() {
            return Some("the name is empty");
        }
        if tag.is_empty() {
            return Some("the tag is empty");
        }
        if tag.len() > Self::MAX_TAG {
            return Some("the tag is too long, at most 128 bytes");
        }
        if !word(tag) {
            return Some("a character that a tag cannot have");
        }
        if tag.starts_with(['.', '-']) {
            return Some("the tag starts with '.' or '-'");
        }
        for (i, part) in name.split('/').enumerate() {
            let part = match part.split_once(':') {
                // A port, so there is a part after it: the tag was split off behind the last '/'.
                Some((host, port)) if i == 0 && !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => host,
                _ => part,
            };
            if part.is_empty() {
                return Some("an empty part between '/'");
            }
            if !word(part) {
                return Some("a character that a name cannot have");
            }
            if !inner(part) {
                return Some("a part starts or ends with something else than a letter or digit");
            }
        }
        None
    }

    /// Without the tag.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tag.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    pub(crate) fn file_name(&self) -> String {
        format!("{}@{}{}", self.name.replace('/', "+").replace(':', "="), self.tag, Self::SUFFIX)
    }

    /// Reads a file name in `refs/`, in the one way that it is written.
    pub(crate) fn from_file_name(file: &str) -> Option<ImageName> {
        let (name, tag) = file.strip_suffix(Self::SUFFIX)?.split_once('@')?;
        let text = format!("{}:{tag}", name.replace('+', "/").replace('=', ":"));
        ImageName::parse(&text).ok().filter(|n| n.file_name() == file)
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.tag)
    }
}

impl std::str::FromStr for ImageName {
    type Err = StoreError;
    fn from_str(text: &str) -> Result<ImageName, StoreError> {
        ImageName::parse(text)
    }
}

/// What the store remembers about an image.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ImageRecord {
    /// The index file.
    #[serde(with = "hex")]
    pub index: Digest,
    /// The image's identity: the digest of its tree, the same wherever its bytes lie.
    #[serde(with = "hex")]
    pub identity: Digest,
    /// Every object that the index refers to.
    #[serde(with = "hex_list")]
    pub objects: Vec<ObjectId>,
    /// The OCI image config, or null.
    #[serde(default)]
    pub config: serde_json::Value,
    /// Where it came from, as the user typed it.
    pub origin: String,
    /// When it was imported, seconds since 1970.
    pub created: u64,
    /// Regular files.
    pub files: u64,
    /// Names.
    pub names: u64,
    /// Bytes of the regular files, holes included.
    pub content_bytes: u64,
    /// Bytes that its import added to the store's packs.
    pub packed_bytes: u64,
}

/// A ref file.
#[derive(Serialize, Deserialize)]
struct RefFile<'a> {
    version: u32,
    /// Of the whole file, with [`NO_DIGEST`] here.
    digest: std::borrow::Cow<'a, str>,
    name: std::borrow::Cow<'a, str>,
    image: std::borrow::Cow<'a, ImageRecord>,
}

/// Readable without knowing the rest.
#[derive(Deserialize)]
struct RefVersion {
    version: u32,
}

const VERSION: u32 = 1;
/// What stands in the place of a ref's digest while that is computed.
const NO_DIGEST: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// The most bytes of a ref file; the image config is most of it.
const MAX_BYTES: u64 = 16 << 20;

/// The bytes of a ref file.
pub(crate) fn encode(name: &ImageName, record: &ImageRecord) -> Result<Vec<u8>, StoreError> {
    use std::borrow::Cow;
    let file = RefFile {
        version: VERSION,
        digest: Cow::Borrowed(NO_DIGEST),
        name: Cow::Owned(name.to_string()),
        image: Cow::Borrowed(record),
    };
    // Measured while it is written: indented, a config of many deeply nested values is a hundred times as long.
    let mut out = Limited { bytes: Vec::new(), left: MAX_BYTES as usize - 1 };
    serde_json::to_writer_pretty(&mut out, &file).map_err(|e| match e.io_error_kind() {
        Some(_) => StoreError::Usage("the image config is too large, more than 16 MiB"),
        None => StoreError::Usage("an image config that is no JSON"),
    })?;
    let mut bytes = out.bytes;
    bytes.push(b'\n');
    let digest = Digest::of(&bytes).to_hex();
    // The first such text is the field: only the version stands before it.
    let at = place_of(&bytes, NO_DIGEST).expect("it was just written");
    bytes[at].copy_from_slice(digest.as_bytes());
    Ok(bytes)
}

/// Where a text first stands in a file.
fn place_of(bytes: &[u8], text: &str) -> Option<std::ops::Range<usize>> {
    let start = bytes.windows(text.len()).position(|window| window == text.as_bytes())?;
    Some(start..start + text.len())
}

/// Whether a ref file says what was once written. Its digest stands in it as `digest`.
fn is_as_written(bytes: &[u8], digest: &str) -> bool {
    let Some(place) = place_of(bytes, digest).filter(|place| place.len() == NO_DIGEST.len()) else { return false };
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes[..place.start]).update(NO_DIGEST.as_bytes()).update(&bytes[place.end..]);
    hasher.finalize().to_hex().as_str() == digest
}

/// Bytes, so many at most.
struct Limited {
    bytes: Vec<u8>,
    left: usize,
}

impl std::io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.left = self.left.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::FileTooLarge)?;
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Reads the record of a name in `dir`.
pub(crate) fn read(dir: &Path, name: &ImageName) -> Result<ImageRecord, StoreError> {
    let path = dir.join(name.file_name());
    let bytes = layout::read_small(&path, MAX_BYTES).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => StoreError::NoImage { name: name.to_string() },
        _ => StoreError::io("read", &path, e),
    })?;
    let corrupt = |why: String| StoreError::Corrupt { path: path.clone(), why };
    let RefVersion { version } = serde_json::from_slice(&bytes).map_err(|e| corrupt(format!("not a ref: {e}")))?;
    if version != VERSION {
        return Err(StoreError::Version { path: path.clone(), version: version.to_string(), known: VERSION });
    }
    let file: RefFile<'_> = serde_json::from_slice(&bytes).map_err(|e| corrupt(format!("not a ref: {e}")))?;
    if !is_as_written(&bytes, &file.digest) {
        return Err(corrupt("its digest is not that of its content; import the image again".into()));
    }
    if file.name != name.to_string() {
        return Err(corrupt(format!("it is the ref of {}", file.name)));
    }
    Ok(file.image.into_owned())
}

/// Every name in `dir`, sorted. Files that are no refs are left out.
pub(crate) fn names(dir: &Path) -> Result<Vec<ImageName>, StoreError> {
    let mut names: Vec<ImageName> =
        layout::list(dir)?.iter().filter_map(|file| ImageName::from_file_name(file)).collect();
    names.sort();
    Ok(names)
}

mod hex {
    use format::Digest;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(digest: &Digest, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(digest)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Digest, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(d)?;
        Digest::from_hex(&text).ok_or_else(|| D::Error::custom("not a digest"))
    }
}

mod hex_list {
    use format::Digest;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Serialize, Deserialize)]
    struct Item(#[serde(with = "super::hex")] Digest);

    pub(super) fn serialize<S: Serializer>(digests: &[Digest], s: S) -> Result<S::Ok, S::Error> {
        s.collect_seq(digests.iter().map(|d| Item(*d)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Digest>, D::Error> {
        Ok(Vec::<Item>::deserialize(d)?.into_iter().map(|Item(d)| d).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_names_are_taken_and_come_back_from_their_files() {
        let table = [
            ("debian", "debian", "latest"),
            ("debian:12", "debian", "12"),
            ("Debian_x.y-z:v1.2_3-rc", "Debian_x.y-z", "v1.2_3-rc"),
            ("library/debian", "library/debian", "latest"),
            ("ghcr.io/a/b/c:x", "ghcr.io/a/b/c", "x"),
            ("localhost:5000/app", "localhost:5000/app", "latest"),
            ("localhost:5000/app:1", "localhost:5000/app", "1"),
            ("a:_x", "a", "_x"),
            ("a__b:1", "a__b", "1"),
            ("0", "0", "latest"),
        ];
        for (text, name, tag) in table {
            let n = ImageName::parse(text).unwrap();
            assert_eq!((n.name(), n.tag()), (name, tag), "{text}");
            let file = n.file_name();
            assert!(file.len() <= 255 && !file.contains('/') && !file.starts_with('.'), "{file}");
            assert_eq!(ImageName::from_file_name(&file), Some(n.clone()));
            assert_eq!(n.to_string().parse::<ImageName>().unwrap(), n);
        }
        let long = format!("{}:t", "a".repeat(239));
        assert_eq!(ImageName::parse(&long).unwrap().file_name().len(), 246);
    }

    #[test]
    fn bad_names_are_refused_with_a_reason() {
        let too_long = "a".repeat(300);
        let long_tag = format!("a:{}", "b".repeat(129));
        let table = [
            ("", "name is empty"),
            (":tag", "name is empty"),
            ("a:", "tag is empty"),
            ("a/", "empty part"),
            ("/a", "empty part"),
            ("a//b", "empty part"),
            (".", "starts or ends"),
            ("..", "starts or ends"),
            ("../a", "starts or ends"),
            ("a/../b", "starts or ends"),
            (".a", "starts or ends"),
            ("-a", "starts or ends"),
            ("a-", "starts or ends"),
            ("a/-b", "starts or ends"),
            ("a b", "a character"),
            ("a\0b", "a character"),
            ("a\nb", "a character"),
            ("a@sha256", "a character"),
            ("a+b", "a character"),
            ("a=b", "a character"),
            ("ä", "a character"),
            ("a:b:c", "a character"),
            ("a:.x", "tag starts"),
            ("a:-x", "tag starts"),
            ("a:ü", "a character"),
            ("a:5000x/b", "a character"),
            ("a:/b", "a character"),
            ("x/a:5000/b", "a character"),
            (&too_long, "too long"),
            (&long_tag, "too long"),
        ];
        for (text, why) in table {
            let error = ImageName::parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text:?}: {error}");
        }
    }

    #[test]
    fn foreign_file_names_are_not_refs() {
        for file in
            ["", "x", "x.json", "a@b", "@b.json", "a@.json", "a@b@c.json", ".a@b.json", "a=x@b.json", "a++b@c.json"]
        {
            assert_eq!(ImageName::from_file_name(file), None, "{file}");
        }
    }

    #[test]
    fn a_config_that_grows_when_it_is_indented_is_refused_in_little_memory() {
        let name = ImageName::parse("a").unwrap();
        let nested = |values: usize| {
            let inner = serde_json::Value::Array(vec![0.into(); values]);
            (0..100).fold(inner, |inside, _| serde_json::Value::Array(vec![inside]))
        };
        let encoded = |values| encode(&name, &ImageRecord { config: nested(values), ..ImageRecord::default() });
        assert!(encoded(1000).unwrap().len() > 100_000);
        let error = encoded(100_000).unwrap_err();
        assert!(error.to_string().contains("too large"), "{error}");
    }

    #[test]
    fn records_round_trip_and_damage_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let name = ImageName::parse("a/b:c").unwrap();
        let record = ImageRecord {
            index: Digest::of(b"i"),
            objects: vec![Digest::of(b"o"), Digest::of(b"p")],
            config: serde_json::json!({"config": {"Env": ["A=ä\"\n"]}}),
            origin: "dir:/x".into(),
            ..ImageRecord::default()
        };
        let good = encode(&name, &record).unwrap();
        let path = dir.path().join(name.file_name());
        std::fs::write(&path, &good).unwrap();
        assert_eq!(read(dir.path(), &name).unwrap(), record);
        let text = String::from_utf8(good.clone()).unwrap();
        let hex = Digest::of(b"i").to_hex();
        let table = [
            (text.replacen("\"version\": 1", "\"version\": 2", 1), "version \"2\""),
            (text.replacen("a/b:c", "a/b:d", 1), "its digest"),
            (text.replacen("dir:/x", "dir:/y", 1), "its digest"),
            (text.replacen(&hex, "00", 1), "not a digest"),
            (text.replacen("\"digest\"", "\"digesu\"", 1), "not a ref"),
            (text[..text.len() / 2].to_owned(), "not a ref"),
            (String::new(), "not a ref"),
        ];
        for (text, why) in table {
            std::fs::write(&path, text).unwrap();
            let error = read(dir.path(), &name).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        for at in 0..good.len() {
            for bit in 0..8 {
                let mut bytes = good.clone();
                bytes[at] ^= 1 << bit;
                std::fs::write(&path, &bytes).unwrap();
                assert!(read(dir.path(), &name).is_err(), "byte {at}, bit {bit}");
            }
        }
        let other = ImageName::parse("a/b:d").unwrap();
        std::fs::write(dir.path().join(other.file_name()), &good).unwrap();
        let error = read(dir.path(), &other).unwrap_err().to_string();
        assert!(error.contains("it is the ref of a/b:c"), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(read(dir.path(), &name), Err(StoreError::NoImage { .. })));
    }
}
