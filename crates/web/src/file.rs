//! The file that was dropped on the page, of which the worker brings parts (`crates/web/page/worker.js`).

use kvant::gguf::Store;

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

/// The file that was dropped; `None` where none was.
pub(crate) fn dropped() -> Option<Box<dyn Store>> {
    let n_bytes = page::size() as u64;
    (n_bytes > 0).then(|| Box::new(File { n_bytes }) as Box<dyn Store>)
}

impl Store for File {
    fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the worker writes as many bytes as there are, or throws, which ends this instance.
        unsafe { page::read(at as f64, bytes.as_mut_ptr(), len) };
        bytes
    }
}
