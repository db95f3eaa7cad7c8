//! Small images, made here.

use super::sha256;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;

/// One file of an archive; a name that ends in a slash is a directory.
pub fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut b = tar::Builder::new(Vec::new());
    for (name, data) in files {
        let mut h = tar::Header::new_gnu();
        let dir = name.ends_with('/');
        h.set_entry_type(if dir { tar::EntryType::Directory } else { tar::EntryType::Regular });
        h.set_mode(if dir { 0o755 } else { 0o644 });
        h.set_size(data.len() as u64);
        h.set_mtime(1_700_000_000);
        b.append_data(&mut h, name, *data).unwrap();
    }
    b.into_inner().unwrap()
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut e = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    e.write_all(bytes).unwrap();
    e.finish().unwrap()
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).unwrap()
}

pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        out.extend_from_slice(&x.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// An OCI layout being made.
pub struct Layout<'a> {
    pub dir: &'a Path,
    manifests: Vec<Value>,
}

impl<'a> Layout<'a> {
    pub fn new(dir: &'a Path) -> Self {
        std::fs::create_dir_all(dir.join("blobs/sha256")).unwrap();
        std::fs::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        Layout { dir, manifests: Vec::new() }
    }

    pub fn blob(&self, bytes: &[u8]) -> String {
        let hex = sha256(bytes);
        std::fs::write(self.dir.join("blobs/sha256").join(&hex), bytes).unwrap();
        format!("sha256:{hex}")
    }

    pub fn json(&self, media_type: &str, value: &Value) -> Value {
        let bytes = serde_json::to_vec(value).unwrap();
        json!({"mediaType": media_type, "digest": self.blob(&bytes), "size": bytes.len()})
    }

    /// An image of blobs and the archives in them; its descriptor.
    pub fn image(&self, platform: &str, layers: &[(Vec<u8>, Vec<u8>)]) -> Value {
        let (os, arch) = platform.split_once('/').unwrap();
        let diff_ids: Vec<String> = layers.iter().map(|(_, t)| format!("sha256:{}", sha256(t))).collect();
        let config = json!({
            "os": os, "architecture": arch, "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "config": {"Entrypoint": ["/bin/x"], "Env": ["A=b"], "User": "1:2", "WorkingDir": "/w", "Labels": {"l": "v"}},
        });
        let config = self.json("application/vnd.oci.image.config.v1+json", &config);
        let layers: Vec<Value> = layers
            .iter()
            .map(|(b, _)| {
                json!({
                    "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": self.blob(b), "size": b.len(),
                })
            })
            .collect();
        let manifest = json!({"schemaVersion": 2, "config": config, "layers": layers});
        self.json("application/vnd.oci.image.manifest.v1+json", &manifest)
    }

    pub fn add(&mut self, mut descriptor: Value, tag: Option<&str>, platform: Option<&str>) {
        if let Some(tag) = tag {
            descriptor["annotations"] = json!({"org.opencontainers.image.ref.name": tag});
        }
        if let Some((os, arch)) = platform.and_then(|p| p.split_once('/')) {
            descriptor["platform"] = json!({"os": os, "architecture": arch});
        }
        self.manifests.push(descriptor);
    }

    pub fn finish(self) {
        let index = json!({"schemaVersion": 2, "manifests": self.manifests});
        std::fs::write(self.dir.join("index.json"), serde_json::to_vec(&index).unwrap()).unwrap();
    }
}

/// A layout with one image of plain layers, called `latest`.
pub fn plain_layout(dir: &Path, layers: &[Vec<u8>]) {
    let mut l = Layout::new(dir);
    let pairs: Vec<_> = layers.iter().map(|t| (t.clone(), t.clone())).collect();
    let image = l.image("linux/amd64", &pairs);
    l.add(image, Some("latest"), None);
    l.finish();
}
