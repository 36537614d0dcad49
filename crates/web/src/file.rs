//! The file dropped on the page, read in parts by the worker (`crates/web/page/worker.js`).

use kvant::gguf::RangeReader;

mod page {
    #[link(wasm_import_module = "file")]
    unsafe extern "C" {
        pub safe fn size() -> f64;
        pub fn read(at: f64, to: *mut u8, len: usize);
    }
}

/// The dropped file.
struct File {
    n_bytes: u64,
}

/// Returns the dropped file; `None` without one.
pub(crate) fn dropped() -> Option<Box<dyn RangeReader>> {
    let n_bytes = page::size() as u64;
    (n_bytes > 0).then(|| Box::new(File { n_bytes }) as Box<dyn RangeReader>)
}

impl RangeReader for File {
    fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the worker writes at most `len` bytes, or throws, which ends this instance.
        unsafe { page::read(at as f64, bytes.as_mut_ptr(), len) };
        bytes
    }
}
