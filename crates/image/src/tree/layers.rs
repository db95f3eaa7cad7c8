//! What the merge notes in a tree: which layer a name is from, and what has happened to a directory in this layer.

use super::{NIL, NodeId, Tree, TreeError};

/// In a directory's `mark`, below the layer's number: this layer has an entry for it.
const EXPLICIT: u16 = 1;
/// What lower layers had put below it is gone.
const PURGED: u16 = 2;
/// This layer has gone through it and up again (`..`), so that it has to be there.
const VISITED: u16 = 4;
/// Bits below the layer's number.
const BITS: u32 = 3;

impl Tree {
    /// Layers that can be told apart.
    pub(crate) const MAX_LAYERS: u16 = (1 << (16 - BITS)) - 1;

    /// Makes everything that is there lower than the first layer.
    pub(crate) fn forget_layers(&mut self) {
        self.layer = 0;
        self.dirents.iter_mut().for_each(|d| d.layer = 0);
        self.nodes.iter_mut().for_each(|n| n.mark = 0);
    }

    /// Names belong to the next layer from now on; `false` when there are too many.
    pub(crate) fn next_layer(&mut self) -> bool {
        let more = self.layer < Tree::MAX_LAYERS;
        self.layer += u16::from(more);
        more
    }

    pub(crate) fn find_dirent(&self, dir: NodeId, name: &[u8]) -> Option<u32> {
        self.names.find(&self.dirents, dir.0, name)
    }

    pub(crate) fn first_dirent(&self, dir: NodeId) -> Option<u32> {
        let n = &self.nodes[dir.0];
        (n.is_dir() && n.a != NIL).then_some(n.a)
    }

    pub(crate) fn next_dirent(&self, dirent: u32) -> Option<u32> {
        let next = self.dirents[dirent].next;
        (next != NIL).then_some(next)
    }

    pub(crate) fn is_of_this_layer(&self, dirent: u32) -> bool {
        self.dirents[dirent].layer == self.layer
    }

    /// Makes a name this layer's.
    pub(crate) fn claim(&mut self, dirent: u32) {
        self.dirents[dirent].layer = self.layer;
    }

    pub(crate) fn is_explicit(&self, dir: NodeId) -> bool {
        self.has_mark(dir, EXPLICIT)
    }

    pub(crate) fn set_explicit(&mut self, dir: NodeId) {
        self.add_mark(dir, EXPLICIT);
    }

    pub(crate) fn is_purged(&self, dir: NodeId) -> bool {
        self.has_mark(dir, PURGED)
    }

    pub(crate) fn set_purged(&mut self, dir: NodeId) {
        self.add_mark(dir, PURGED);
    }

    pub(crate) fn is_visited(&self, dir: NodeId) -> bool {
        self.has_mark(dir, VISITED)
    }

    pub(crate) fn set_visited(&mut self, dir: NodeId) {
        self.add_mark(dir, VISITED);
    }

    fn has_mark(&self, dir: NodeId, bit: u16) -> bool {
        let mark = self.nodes[dir.0].mark;
        mark >> BITS == self.layer && mark & bit != 0
    }

    /// Marks of other layers are void.
    fn add_mark(&mut self, dir: NodeId, bit: u16) {
        let layer = self.layer;
        let mark = &mut self.nodes[dir.0].mark;
        let old = if *mark >> BITS == layer { *mark & ((1 << BITS) - 1) } else { 0 };
        *mark = layer << BITS | old | bit;
    }

    /// Gives `node` the name, in place of what had it: `old`.
    pub(crate) fn relink(&mut self, dir: NodeId, name: &[u8], node: NodeId, old: Option<u32>) -> Result<(), TreeError> {
        if self.is_dir(node) {
            return Err(TreeError::LinkToDirectory(self.path_in(dir, name)));
        }
        if let Some(old) = old {
            if self.dirent_node(old) == node {
                self.claim(old);
                return Ok(());
            }
            // What goes away may be a directory with the node's last name in it.
            self.nodes[node.0].nlink += 1;
            self.unlink_dirent(old);
            self.nodes[node.0].nlink -= 1;
        }
        self.link(dir, name, node)
    }
}
