//! OCI and docker documents: from an index to one image's manifest, config and layers.
//!
//! Documents are read by what they hold, not only by the media type that they claim. Every blob is checked against
//! its descriptor. `urls` are never followed: a layer that is not here is missing.

use crate::Platform;
use crate::blob::{BlobDigest, Promise};
use crate::blobs::{Blobs, blob_name};
use crate::error::ImportError;
use crate::limits::Limits;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Indexes inside indexes.
const MAX_NESTING: usize = 4;
/// Names listed in a message.
const MAX_LISTED: usize = 12;

const REF_NAME: &str = "org.opencontainers.image.ref.name";
const CONTAINERD_NAME: &str = "io.containerd.image.name";

/// An image, found and described; its layers not yet read.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) config: Value,
    pub(crate) layers: Vec<Layer>,
}

/// A layer to be read.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Its file.
    pub(crate) name: String,
    pub(crate) promise: Promise,
    pub(crate) diff_id: BlobDigest,
    /// For messages.
    pub(crate) place: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: Option<String>,
    digest: String,
    size: u64,
    annotations: Option<BTreeMap<String, String>>,
    platform: Option<PlatformJson>,
}

#[derive(Debug, Clone, Deserialize)]
struct PlatformJson {
    os: Option<String>,
    architecture: Option<String>,
    variant: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    schema_version: Option<u64>,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

impl Descriptor {
    fn digest(&self, place: &str) -> Result<BlobDigest, ImportError> {
        BlobDigest::parse(&self.digest).ok_or_else(|| {
            ImportError::corrupt(place, format!("{:?} is not a sha256 or sha512 digest", shorten(&self.digest)))
        })
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// What the user may call it.
    fn names(&self) -> impl Iterator<Item = &str> {
        [self.annotation(REF_NAME), self.annotation(CONTAINERD_NAME)].into_iter().flatten()
    }

    /// How well it fits: `None` not at all, larger is better.
    fn fit(&self, want: &Platform) -> Option<u32> {
        match &self.platform {
            None => Some(1),
            Some(p) => fit(p, want),
        }
    }
}

fn fit(have: &PlatformJson, want: &Platform) -> Option<u32> {
    let same = |have: &Option<String>, want: &str| have.as_deref().is_none_or(|h| h.is_empty() || h == want);
    if !same(&have.os, &want.os) || !same(&have.architecture, &want.architecture) {
        return None;
    }
    let have = have.variant.as_deref().filter(|v| !v.is_empty());
    match (&want.variant, have) {
        (Some(w), Some(h)) => (w == h).then_some(4),
        // What most machines run when nothing is said.
        (None, Some("v8")) | (None, None) => Some(4),
        (Some(_), None) => Some(2),
        (None, Some(_)) => Some(3),
    }
}

/// Finds the image called `tag` (or the only one) for `platform`.
pub(crate) fn find(
    blobs: &Blobs,
    tag: Option<&str>,
    platform: &Platform,
    limits: &Limits,
) -> Result<Image, ImportError> {
    let place = blobs.place();
    check_layout(blobs, limits)?;
    let nothing = Promise { digest: None, size: None };
    let Some(bytes) = blobs.document("index.json", &nothing, limits.manifest_bytes)? else {
        let what = "there is no index.json: not an OCI image layout".into();
        return Err(ImportError::NotFound { place: place.into(), what });
    };
    let index: Document = json(&bytes, &format!("{place}: index.json"))?;
    let all = index.manifests.unwrap_or_default();
    let candidates = by_name(all, tag, place)?;
    let manifest = by_platform(blobs, candidates, platform, limits, place, 0)?;
    describe(blobs, &manifest, platform, limits)
}

fn check_layout(blobs: &Blobs, limits: &Limits) -> Result<(), ImportError> {
    let nothing = Promise { digest: None, size: None };
    let Some(bytes) = blobs.document("oci-layout", &nothing, limits.manifest_bytes)? else { return Ok(()) };
    let place = format!("{}: oci-layout", blobs.place());
    let value: Value = json(&bytes, &place)?;
    match value.get("imageLayoutVersion").and_then(Value::as_str) {
        Some(v) if v.starts_with("1.") => Ok(()),
        other => Err(ImportError::Unsupported {
            place,
            what: format!("layout version {:?} is not known", shorten(other.unwrap_or("(none)"))),
        }),
    }
}

/// The descriptors that carry the tag.
fn by_name(all: Vec<Descriptor>, tag: Option<&str>, place: &str) -> Result<Vec<Descriptor>, ImportError> {
    let place = place.to_owned();
    let mut names: Vec<String> = all.iter().flat_map(|d| d.names().next()).map(shorten).collect();
    names.sort();
    names.dedup();
    let listed = || match names.len() {
        0 => "none of its images has a name".to_owned(),
        n if n > MAX_LISTED => format!("it has {}, … ({n} names)", names[..MAX_LISTED].join(", ")),
        _ => format!("it has {}", names.join(", ")),
    };
    match tag {
        Some(tag) => {
            let found: Vec<Descriptor> = all.iter().filter(|d| d.names().any(|n| same_name(n, tag))).cloned().collect();
            if found.is_empty() {
                return Err(ImportError::NotFound { place, what: format!("no image is called {tag:?}; {}", listed()) });
            }
            Ok(found)
        }
        None if all.is_empty() => Err(ImportError::NotFound { place, what: "the index lists no image".into() }),
        None if names.len() > 1 => {
            Err(ImportError::NotFound { place, what: format!("say which image, as oci:DIR:TAG; {}", listed()) })
        }
        None => Ok(all),
    }
}

/// Whether two names mean the same image, docker's defaults filled in.
pub(crate) fn same_name(a: &str, b: &str) -> bool {
    fn full(name: &str) -> String {
        let name = name.strip_prefix("docker.io/").unwrap_or(name);
        let name = name.strip_prefix("library/").unwrap_or(name);
        let last = name.rsplit('/').next().unwrap_or(name);
        if last.contains([':', '@']) { name.to_owned() } else { format!("{name}:latest") }
    }
    a == b || full(a) == full(b)
}

/// One manifest out of several descriptors, indexes followed.
fn by_platform(
    blobs: &Blobs,
    candidates: Vec<Descriptor>,
    want: &Platform,
    limits: &Limits,
    place: &str,
    depth: usize,
) -> Result<Descriptor, ImportError> {
    let best = candidates.iter().filter_map(|d| d.fit(want)).max();
    let Some(found) = candidates.iter().find(|d| d.fit(want).is_some() && d.fit(want) == best) else {
        let mut have: Vec<String> = candidates.iter().filter_map(|d| d.platform.as_ref()).map(platform_text).collect();
        have.retain(|p| !p.starts_with("unknown/"));
        have.sort();
        have.dedup();
        have.truncate(MAX_LISTED);
        let what = format!("no image for {want}; there is {}; choose with --platform", have.join(", "));
        return Err(ImportError::NotFound { place: place.into(), what });
    };
    // Descriptors that name no platform cannot be told apart.
    if best == Some(1) && candidates.iter().any(|d| d.fit(want) == best && d.digest != found.digest) {
        let what = "several images fit, and nothing tells them apart; copy the one you want to a layout of its own";
        return Err(ImportError::NotFound { place: place.into(), what: what.into() });
    }
    let is_index =
        found.media_type.as_deref().is_some_and(|m| m.contains("image.index") || m.contains("manifest.list"));
    if !is_index {
        return Ok(found.clone());
    }
    let digest = found.digest(place)?;
    let place = format!("{}: index {}", blobs.place(), digest.short());
    if depth >= MAX_NESTING {
        return Err(ImportError::Limit { place, what: format!("indexes inside each other deeper than {MAX_NESTING}") });
    }
    let index: Document = json(&blob(blobs, found, "index", limits)?, &place)?;
    let Some(list) = index.manifests.filter(|l| !l.is_empty()) else {
        return Err(ImportError::NotFound { place, what: "it lists no image".into() });
    };
    by_platform(blobs, list, want, limits, &place, depth + 1)
}

fn platform_text(p: &PlatformJson) -> String {
    let part = |s: &Option<String>| shorten(s.as_deref().filter(|s| !s.is_empty()).unwrap_or("?"));
    match p.variant.as_deref().filter(|v| !v.is_empty()) {
        Some(v) => format!("{}/{}/{}", part(&p.os), part(&p.architecture), shorten(v)),
        None => format!("{}/{}", part(&p.os), part(&p.architecture)),
    }
}

/// Reads manifest and config.
fn describe(blobs: &Blobs, found: &Descriptor, platform: &Platform, limits: &Limits) -> Result<Image, ImportError> {
    let digest = found.digest(blobs.place())?;
    let place = format!("{}: manifest {}", blobs.place(), digest.short());
    let document: Document = json(&blob(blobs, found, "manifest", limits)?, &place)?;
    if document.schema_version == Some(1) {
        let what = "docker manifests of schema 1 are not read; convert the image with `skopeo copy`".into();
        return Err(ImportError::Unsupported { place, what });
    }
    let (Some(config), Some(layers)) = (document.config, document.layers) else {
        return Err(ImportError::corrupt(place, "it has no config or no layers"));
    };
    if layers.len() > limits.layers {
        let what = format!("it has {} layers, the limit is {}", layers.len(), limits.layers);
        return Err(ImportError::Limit { place, what });
    }
    let config_digest = config.digest(&place)?;
    let config_place = format!("{}: config {}", blobs.place(), config_digest.short());
    let config: Value = json(&blob(blobs, &config, "config", limits)?, &config_place)?;
    check_platform(&config, platform, &config_place)?;
    let diff_ids = diff_ids(&config, layers.len(), &config_place)?;
    let count = layers.len();
    let layers = layers.iter().zip(diff_ids).enumerate().map(|(i, (layer, diff_id))| {
        let digest = layer.digest(&place)?;
        let place = format!("{}: layer {} of {count} ({})", blobs.place(), i + 1, digest.short());
        check_media_type(layer.media_type.as_deref(), &place)?;
        let promise = Promise { digest: Some(digest.clone()), size: Some(layer.size) };
        Ok(Layer { name: blob_name(&digest), promise, diff_id, place })
    });
    Ok(Image { config, layers: layers.collect::<Result<_, ImportError>>()? })
}

/// Refuses an image that was made for something else than the user asked for.
pub(crate) fn check_platform(config: &Value, want: &Platform, place: &str) -> Result<(), ImportError> {
    let text = |key| config.get(key).and_then(Value::as_str).map(str::to_owned);
    let have = PlatformJson { os: text("os"), architecture: text("architecture"), variant: text("variant") };
    if fit(&have, want).is_some() {
        return Ok(());
    }
    let have = platform_text(&have);
    let what = format!("this image is for {have}, wanted is {want}; choose with --platform {have}");
    Err(ImportError::NotFound { place: place.into(), what })
}

/// The digests of the unpacked layers, as many as there are layers.
pub(crate) fn diff_ids(config: &Value, layers: usize, place: &str) -> Result<Vec<BlobDigest>, ImportError> {
    let Some(list) = config.get("rootfs").and_then(|r| r.get("diff_ids")).and_then(Value::as_array) else {
        let what = "the config has no rootfs.diff_ids: an artifact, not an image".into();
        return Err(ImportError::Unsupported { place: place.into(), what });
    };
    if list.len() != layers {
        let what = format!("the config names {} layers, the manifest {layers}", list.len());
        return Err(ImportError::corrupt(place, what));
    }
    let digest = |v: &Value| {
        let bad = || {
            ImportError::corrupt(place, format!("diff_id {} is not a sha256 or sha512 digest", shorten(&v.to_string())))
        };
        BlobDigest::from_json(v).ok_or_else(bad)
    };
    list.iter().map(digest).collect()
}

/// Layers are known by their content; only what is certainly something else is refused here.
fn check_media_type(media_type: Option<&str>, place: &str) -> Result<(), ImportError> {
    let Some(media_type) = media_type.filter(|m| !m.is_empty()) else { return Ok(()) };
    let what = if media_type.contains("encrypted") {
        "the layer is encrypted"
    } else if media_type.contains("tar") || media_type.contains("rootfs") {
        return Ok(());
    } else {
        "the layer is not a tar archive: an artifact, not an image"
    };
    let what = format!("{what} (media type {:?})", shorten(media_type));
    Err(ImportError::Unsupported { place: place.into(), what })
}

/// Reads a small blob and checks it.
fn blob(blobs: &Blobs, descriptor: &Descriptor, what: &str, limits: &Limits) -> Result<Vec<u8>, ImportError> {
    let digest = descriptor.digest(blobs.place())?;
    let promise = Promise { digest: Some(digest.clone()), size: Some(descriptor.size) };
    let missing = || ImportError::NotFound {
        place: blobs.place().into(),
        what: format!("the blob of the {what} ({digest}) is missing; the layout is incomplete, copy the image again"),
    };
    blobs.document(&blob_name(&digest), &promise, limits.manifest_bytes)?.ok_or_else(missing)
}

pub(crate) fn json<T: for<'de> Deserialize<'de>>(bytes: &[u8], place: &str) -> Result<T, ImportError> {
    serde_json::from_slice(bytes)
        .map_err(|e| ImportError::corrupt(place, format!("not the JSON that was expected: {e}")))
}

/// Text from an image, cut for messages.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(100) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}
