//! `docker save` archives: `manifest.json` with layers by name (all versions), or an OCI layout in a tar (docker
//! since 25, `oci-archive:` of skopeo).
//!
//! The files in them are read in any order, so an archive that is compressed or comes through a pipe is first
//! unpacked to a scratch file of the import.

use crate::archive::Archive;
use crate::blob::{BlobDigest, BlobReader, Promise};
use crate::blobs::Blobs;
use crate::context::Context;
use crate::decode::{DecodeError, Decoder};
use crate::error::ImportError;
use crate::oci::{self, Image, Layer, same_name, shorten};
use serde::Deserialize;
use serde_json::Value;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

const NOTHING: Promise = Promise { digest: None, size: None };

/// Opens the archive at `path` (`-` is standard input).
pub(crate) fn open(context: &Context<'_>, path: &Path) -> Result<Blobs, ImportError> {
    let place = format!("docker-archive:{}", path.display());
    let file = if path.as_os_str() == "-" {
        spool(context, Box::new(io::stdin()), &place)?
    } else {
        let mut file = open_file(path, &place)?;
        if is_plain_file(&mut file).map_err(|e| ImportError::io("read", &place, e))? {
            file
        } else {
            spool(context, Box::new(file), &place)?
        }
    };
    let archive = Archive::scan(file, &place)?;
    Ok(Blobs::Archive { place, archive })
}

/// Opens a file that the user named.
pub(crate) fn open_file(path: &Path, place: &str) -> Result<File, ImportError> {
    match File::open(path) {
        Ok(file) if file.metadata().is_ok_and(|m| m.is_dir()) => {
            Err(ImportError::NotFound { place: place.into(), what: "a directory, not a file".into() })
        }
        Ok(file) => Ok(file),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Err(ImportError::NotFound { place: place.into(), what: "no such file".into() })
        }
        Err(e) => Err(ImportError::io("open", place, e)),
    }
}

/// Whether it can be read at any offset as it is.
fn is_plain_file(file: &mut File) -> io::Result<bool> {
    if !file.metadata()?.is_file() {
        return Ok(false);
    }
    let mut head = Vec::new();
    Read::take(&*file, Decoder::HEAD as u64).read_to_end(&mut head)?;
    file.seek(SeekFrom::Start(0))?;
    Ok(!Decoder::is_compressed(&head))
}

/// Unpacks a stream to a scratch file.
fn spool(context: &Context<'_>, from: Box<dyn Read + Send + '_>, place: &str) -> Result<File, ImportError> {
    let took = |n| context.took(n);
    let mut decoder = Decoder::new(BlobReader::new(from, &NOTHING, &took), &context.wide_window);
    let mut out = context.session.tmp_file("archive")?;
    let mut buffer = vec![0; 256 << 10];
    let mut total = 0u64;
    loop {
        let n = decoder.fill(&mut buffer).map_err(|e| match e {
            DecodeError::Read(e) => ImportError::io("read", place, e),
            e => ImportError::corrupt(place, e.to_string()),
        })?;
        total += n as u64;
        context.check_ratio(place, total, decoder.position())?;
        out.write_all(&buffer[..n]).map_err(|e| ImportError::io("unpack to a scratch file", place, e))?;
        if n < buffer.len() {
            break;
        }
    }
    out.file().try_clone().map_err(|e| ImportError::io("open the scratch file of", place, e))
}

/// Finds the image called `tag` (or the only one).
pub(crate) fn find(context: &Context<'_>, blobs: &Blobs, tag: Option<&str>) -> Result<Image, ImportError> {
    let (options, place) = (context.options, blobs.place());
    let limits = &options.limits;
    let oci = || oci::find(blobs, tag, &options.platform, limits);
    let has_index = blobs.find("index.json")?.is_some();
    let Some(bytes) = blobs.document("manifest.json", &NOTHING, limits.manifest_bytes)? else {
        if has_index {
            return oci();
        }
        let what =
            "neither manifest.json nor index.json: not an image archive (for a root file system use tar:)".into();
        return Err(ImportError::NotFound { place: place.into(), what });
    };
    let saved: Vec<Saved> = oci::json(&bytes, &format!("{place}: manifest.json"))?;
    let saved = choose(saved, tag, place)?;
    if saved.layers.len() > limits.layers {
        let what = format!("it has {} layers, the limit is {}", saved.layers.len(), limits.layers);
        return Err(ImportError::Limit { place: place.into(), what });
    }
    let config_place = format!("{place}: {}", shorten(&saved.config));
    let missing = |name: &str| {
        let what = format!("{} is missing from the archive; save the image again", shorten(name));
        ImportError::NotFound { place: place.into(), what }
    };
    let promise = Promise { digest: named_digest(&saved.config), size: None };
    let config = blobs.document(&saved.config, &promise, limits.manifest_bytes)?;
    let config: Value = oci::json(&config.ok_or_else(|| missing(&saved.config))?, &config_place)?;
    if let Err(e) = oci::check_platform(&config, &options.platform, &config_place) {
        // The index beside it may hold the image for other platforms.
        return if has_index { oci() } else { Err(e) };
    }
    let count = saved.layers.len();
    let diff_ids = oci::diff_ids(&config, count, &config_place)?;
    let layer = |(i, (name, diff_id)): (usize, (&String, BlobDigest))| {
        let place = format!("{place}: layer {} of {count} ({})", i + 1, shorten(name));
        let file = blobs.find(name)?.ok_or_else(|| missing(name))?;
        let promise = Promise { digest: named_digest(name), size: Some(file.len()) };
        Ok(Layer { name: name.clone(), promise, diff_id, place })
    };
    let layers = saved.layers.iter().zip(diff_ids).enumerate().map(layer).collect::<Result<_, ImportError>>()?;
    Ok(Image { config, layers })
}

fn choose(mut all: Vec<Saved>, tag: Option<&str>, place: &str) -> Result<Saved, ImportError> {
    let place = place.to_owned();
    let names: Vec<String> = all.iter().flat_map(|s| s.repo_tags.iter().flatten()).map(|t| shorten(t)).collect();
    let at = match tag {
        Some(tag) => all.iter().position(|s| s.repo_tags.iter().flatten().any(|t| same_name(t, tag))),
        None if all.len() == 1 => Some(0),
        None => {
            let what =
                format!("it holds {} images, say which as docker-archive:FILE:NAME; {}", all.len(), names.join(", "));
            return Err(ImportError::NotFound { place, what });
        }
    };
    match (at, tag) {
        (Some(at), _) => Ok(all.swap_remove(at)),
        (None, tag) => {
            let what = format!("no image is called {:?}; it has {}", tag.unwrap_or_default(), names.join(", "));
            Err(ImportError::NotFound { place, what })
        }
    }
}

/// The digest in a file's name: `blobs/sha256/HEX`, `HEX.json`.
fn named_digest(name: &str) -> Option<BlobDigest> {
    if let Some(rest) = name.strip_prefix("blobs/") {
        return BlobDigest::parse(&rest.replacen('/', ":", 1));
    }
    BlobDigest::parse(&format!("sha256:{}", name.strip_suffix(".json")?))
}
