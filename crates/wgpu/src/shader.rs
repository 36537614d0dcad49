//! Compiles kernel sources; an error names the file, the line and its text.

use crate::WgpuError;
use crate::constants::Constants;
use crate::error::one_line;
use crate::gpu::ready;
use crate::unroll::unrolled;

/// A file that sources share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// Its name in errors.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
}

/// A source: its constants, the parts it shares with others, its own text.
#[derive(Debug)]
pub(crate) struct Source {
    /// Its parts in order, its own text last.
    pub parts: &'static [Part],
    /// The constants of the parts.
    pub constants: fn() -> Constants,
}

/// A compiled entry point of a source.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// The name of its entry point.
    pub name: String,
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
}

/// The text that is compiled, with the files of its lines.
pub(crate) struct Text {
    pub whole: String,
    /// The name of each part, and its first line, counted from 1.
    parts: Vec<(&'static str, usize)>,
}

impl Text {
    /// The text of `source`, and the constants of a variant of it.
    pub fn new(source: &Source, variant: &Constants) -> Self {
        let mut text = Self { whole: String::new(), parts: Vec::new() };
        text.push("constants", (source.constants)().text());
        text.push("constants of the variant", variant.text());
        source.parts.iter().for_each(|part| text.push(part.name, part.text));
        if variant.unrolls() {
            text.whole = unrolled(&text.whole);
        }
        text
    }

    fn push(&mut self, name: &'static str, part: &str) {
        self.parts.push((name, self.whole.lines().count() + 1));
        self.whole += part;
    }

    /// Returns `file.wgsl:line` of line `line` of the whole, and the text of the line.
    fn place(&self, line: usize) -> (String, String) {
        let of = self.parts.iter().rev().find(|(_, first)| *first <= line);
        let (name, first) = of.copied().unwrap_or(("constants", 1));
        let text = self.whole.lines().nth(line.saturating_sub(1)).unwrap_or_default();
        (format!("{name}:{}", line + 1 - first), text.trim().to_owned())
    }
}

/// Compiles the entry point `name` of a variant of `source`.
///
/// # Errors
/// [`WgpuError::Compile`] with the first error in the source.
pub(crate) fn compile(
    device: &wgpu::Device,
    source: &Source,
    variant: &Constants,
    name: &str,
) -> Result<Kernel, WgpuError> {
    let text = Text::new(source, variant);
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some(name),
        source: wgpu::ShaderSource::Wgsl(text.whole.as_str().into()),
    });
    let messages = ready(module.get_compilation_info()).messages;
    let refused = ready(scope.pop());
    let is_error =
        |message: &&wgpu::CompilationMessage| message.message_type == wgpu::CompilationMessageType::Error;
    if let Some(message) = messages.iter().find(is_error) {
        let line = message.location.map_or(0, |location| location.line_number as usize);
        let (place, line) = text.place(line);
        return Err(WgpuError::Compile { place, problem: one_line(&message.message), line });
    }
    let scope_of_pipeline = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(name),
        layout: None,
        module: &module,
        entry_point: Some(name),
        compilation_options: Default::default(),
        cache: None,
    });
    if let Some(error) = refused.or(ready(scope_of_pipeline.pop())) {
        let (place, line) = text.place(text.whole.lines().count());
        return Err(WgpuError::Compile { place, problem: one_line(&error.to_string()), line });
    }
    let layout = pipeline.get_bind_group_layout(0);
    Ok(Kernel { name: name.to_owned(), pipeline, layout })
}
