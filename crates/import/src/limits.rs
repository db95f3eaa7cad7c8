//! What a source may ask for. Beyond these an import ends with an error that names the entry.

/// Bytes that names, inodes and the like may take in memory.
pub(crate) const TREE_BYTES: usize = 180 << 20;
/// The same for each name, where very many are allowed.
pub(crate) const BYTES_PER_NAME: usize = 94;

/// Limits on one import. The defaults are far above anything that real images hold.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Names (directory entries) in the image. The default keeps an import below 256 MiB of memory, and so does a limit
    /// on what they take there: 180 MiB, or 94 bytes for each name where more than the default are allowed. No index
    /// holds more than 4,194,303.
    pub names: u32,
    /// Entries of one layer.
    pub layer_entries: u64,
    /// Layers of an image.
    pub layers: usize,
    /// Bytes of one manifest, index or config.
    pub manifest_bytes: u64,
    /// Bytes that one layer may unpack to.
    pub layer_bytes: u64,
    /// Bytes of file content (holes not counted) that an image may unpack to.
    pub unpacked_bytes: u64,
    /// Size of one file, holes included. Blocks are numbered with 32 bits: never above 16 TiB less one block.
    pub file_bytes: u64,
    /// Sum of the sizes of all files, holes included; no layout can address more than 16 TiB.
    pub sparse_bytes: u64,
    /// How many times its own size a compressed layer may unpack to, once that is beyond `ratio_from` bytes.
    pub ratio: u64,
    /// See `ratio`.
    pub ratio_from: u64,
    /// Bytes of one PAX header or GNU long name.
    pub header_bytes: u64,
    /// Pieces of one sparse file.
    pub sparse_pieces: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            names: 2_000_000,
            layer_entries: 16 << 20,
            layers: 1_000,
            manifest_bytes: 4 << 20,
            layer_bytes: 1 << 40,
            unpacked_bytes: 4 << 40,
            file_bytes: (16 << 40) - 4096,
            sparse_bytes: 15 << 40,
            ratio: 10_000,
            ratio_from: 16 << 30,
            header_bytes: 1 << 20,
            sparse_pieces: 400_000,
        }
    }
}
