//! The block map behind the metadata: which space each block of content comes from.

use super::PlanError;
use super::plan::{BLOCK, Plan};
use super::rows::{Rows, corrupt};
use crate::index::Index;
use format::index::{Extent, Place};

/// Where a run of the image's blocks behind the metadata comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Zeros.
    Hole {
        /// Blocks in the run.
        blocks: u64,
    },
    /// Consecutive blocks of a space.
    Space {
        /// Row of the index's objects.
        object: u32,
        /// First block in the object's space.
        space_block: u32,
        /// Blocks in the run.
        blocks: u64,
    },
}

impl Data {
    /// Blocks in the run.
    pub fn blocks(&self) -> u64 {
        match *self {
            Data::Hole { blocks } | Data::Space { blocks, .. } => blocks,
        }
    }

    fn with_blocks(self, blocks: u64) -> Self {
        match self {
            Data::Hole { .. } => Data::Hole { blocks },
            Data::Space { object, space_block, .. } => Data::Space { object, space_block, blocks },
        }
    }

    /// This run and the one behind it as one, if they are.
    fn join(self, next: Data) -> Option<Data> {
        let blocks = self.blocks() + next.blocks();
        match (self, next) {
            (Data::Hole { .. }, Data::Hole { .. }) => Some(Data::Hole { blocks }),
            (
                Data::Space { object, space_block, blocks: before },
                Data::Space { object: next_object, space_block: next_block, .. },
            ) if object == next_object && u64::from(space_block) + before == u64::from(next_block) => {
                Some(Data::Space { object, space_block, blocks })
            }
            _ => None,
        }
    }
}

impl Plan {
    /// What the image's block number `block` holds (counted from the image's start, not in the metadata), and for
    /// how many blocks from there on; runs end with their file.
    ///
    /// `index` is the one that was planned.
    pub fn data_at(&self, index: &Index, block: u64) -> Result<Data, PlanError> {
        let at = self.content_block(block, 1)?;
        Finder { plan: self, rows: Rows::of(index), ino: 0 }.at(at)
    }

    /// The number among the blocks of content of the image's block `block`, if that and the following `blocks` are
    /// content.
    fn content_block(&self, block: u64, blocks: u64) -> Result<u64, PlanError> {
        let image = self.image_len() / BLOCK;
        match block.checked_sub(self.regions.data.into()) {
            Some(at) if block < image && blocks <= image - block => Ok(at),
            _ => {
                let end = block.saturating_add(blocks).saturating_mul(BLOCK);
                Err(PlanError::Range { start: block.saturating_mul(BLOCK), end, what: "content" })
            }
        }
    }

    /// The runs that make up `blocks` blocks of content from `block` on, in order. Runs that continue each other,
    /// of different files too, are one.
    ///
    /// `index` is the one that was planned. After an error there is nothing more.
    pub fn data_runs<'a>(&'a self, index: &'a Index, block: u64, blocks: u64) -> DataRuns<'a> {
        let finder = Finder { plan: self, rows: Rows::of(index), ino: 0 };
        DataRuns { finder, block, blocks, ahead: None }
    }
}

/// Runs of content; see [`Plan::data_runs`].
pub struct DataRuns<'a> {
    finder: Finder<'a>,
    /// The block behind `ahead`, counted from the image's start.
    block: u64,
    /// Blocks still to be found.
    blocks: u64,
    ahead: Option<Data>,
}

impl std::fmt::Debug for DataRuns<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DataRuns").field("block", &self.block).field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

impl DataRuns<'_> {
    fn find(&mut self) -> Result<Option<Data>, PlanError> {
        if self.blocks == 0 {
            return Ok(None);
        }
        let found = self.finder.plan.content_block(self.block, self.blocks).and_then(|at| self.finder.at(at));
        let found = found.inspect_err(|_| self.blocks = 0)?;
        let found = found.with_blocks(found.blocks().min(self.blocks));
        self.block += found.blocks();
        self.blocks -= found.blocks();
        Ok(Some(found))
    }
}

impl Iterator for DataRuns<'_> {
    type Item = Result<Data, PlanError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut run = match self.ahead.take() {
            Some(run) => run,
            None => match self.find() {
                Ok(run) => run?,
                Err(e) => return Some(Err(e)),
            },
        };
        loop {
            match self.find() {
                Ok(Some(next)) => match run.join(next) {
                    Some(joined) => run = joined,
                    None => {
                        self.ahead = Some(next);
                        return Some(Ok(run));
                    }
                },
                Ok(None) => return Some(Ok(run)),
                Err(e) => return Some(Err(e)),
            }
        }
    }
}

struct Finder<'a> {
    plan: &'a Plan,
    rows: Rows<'a>,
    /// The inode found last; the next one is often it or near.
    ino: usize,
}

impl Finder<'_> {
    /// What the content's block `at` holds, up to the end of its file.
    fn at(&mut self, at: u64) -> Result<Data, PlanError> {
        let plan = self.plan;
        if at >= u64::from(plan.data_blocks) {
            return Ok(Data::Hole { blocks: u64::from(plan.data_blocks) + 1 - at });
        }
        let at = at as u32;
        let starts = &plan.data[..plan.slots.len()];
        let near = |ino: usize| starts[ino] <= at && plan.data[ino + 1] > at;
        self.ino = match (self.ino..starts.len()).take(8).find(|ino| near(*ino)) {
            Some(ino) => ino,
            None => starts.partition_point(|start| *start <= at) - 1,
        };
        let (ino, start, end) = (self.ino as u32, plan.data[self.ino], plan.data[self.ino + 1]);
        let wrong = || corrupt("inode", ino, "not as planned");
        let (offset, left) = (at - start, u64::from(end - at));
        let place = self.rows.places.get(self.ino).ok_or_else(wrong)?;
        if !matches!(place.object.get(), Place::MANY | Place::NONE) {
            let space_block = place.value.get().checked_add(offset).ok_or_else(wrong)?;
            return Ok(Data::Space { object: place.object.get(), space_block, blocks: left });
        }
        let file = plan.fragments.get(ino).ok_or_else(wrong)?;
        // The file's block, and how many blocks follow it in the image as they do in the file.
        let (block, left) = match file.chunk_bits {
            None => (u64::from(offset), left),
            Some(bits) => {
                let runs = plan.fragments.runs(file);
                let nth = runs.partition_point(|run| run.block <= offset).checked_sub(1).ok_or_else(wrong)?;
                let run = &runs[nth];
                let left = runs.get(nth + 1).map_or(left, |next| u64::from(next.block - offset));
                ((u64::from(run.chunk) << bits) + u64::from(offset - run.block), left)
            }
        };
        let extents = file.extents(&self.rows).ok_or_else(wrong)?;
        let nth = extents.partition_point(|extent| u64::from(extent.file_block.get()) <= block);
        if let Some(extent) = nth.checked_sub(1).map(|nth| &extents[nth]) {
            let within = block - u64::from(extent.file_block.get());
            let count = u64::from(extent.count.get() & !Extent::LAST);
            if within < count {
                let space_block = extent.space_block.get().checked_add(within as u32).ok_or_else(wrong)?;
                return Ok(Data::Space { object: extent.object.get(), space_block, blocks: left.min(count - within) });
            }
        }
        let hole = extents.get(nth).map_or(left, |next| left.min(u64::from(next.file_block.get()) - block));
        Ok(Data::Hole { blocks: hole })
    }
}
