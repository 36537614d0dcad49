//! Sources and compiled kernels.

use std::borrow::Cow;

use crate::imports::Object;

/// Describes a source to parse.
#[derive(Debug)]
pub struct ShaderModuleDescriptor<'a> {
    /// Its name; unused.
    pub label: Option<&'a str>,
    /// Its text.
    pub source: ShaderSource<'a>,
}

/// The text of a source.
#[derive(Debug)]
pub enum ShaderSource<'a> {
    /// In WGSL, which the browser compiles.
    Wgsl(Cow<'a, str>),
}

/// A parsed source.
#[derive(Debug)]
pub struct ShaderModule(pub(crate) Object);

impl ShaderModule {
    /// Returns the compilation messages; waits until the source is parsed.
    pub fn get_compilation_info(&self) -> impl Future<Output = CompilationInfo> {
        let refused = crate::imports::refusal(&self.0).map(|text| {
            let (line, message) = text.split_once(' ').unwrap_or(("0", &text));
            let location = line.parse().ok().map(|line_number| SourceLocation { line_number });
            let message_type = CompilationMessageType::Error;
            CompilationMessage { message: message.to_owned(), message_type, location }
        });
        std::future::ready(CompilationInfo { messages: refused.into_iter().collect() })
    }
}

/// The messages of a compilation.
#[derive(Debug)]
pub struct CompilationInfo {
    /// The first error, if any.
    pub messages: Vec<CompilationMessage>,
}

/// A compilation message.
#[derive(Debug)]
pub struct CompilationMessage {
    /// The text.
    pub message: String,
    /// The severity.
    pub message_type: CompilationMessageType,
    /// The location.
    pub location: Option<SourceLocation>,
}

/// Severity of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompilationMessageType {
    /// The source does not compile.
    Error,
}

/// A location in a source.
#[derive(Debug, Clone, Copy)]
pub struct SourceLocation {
    /// The line, from 1.
    pub line_number: u32,
}

/// Describes an entry point to compile.
#[derive(Debug)]
pub struct ComputePipelineDescriptor<'a> {
    /// Its name; unused.
    pub label: Option<&'a str>,
    /// Its bindings: derived from the source.
    pub layout: Option<&'a std::convert::Infallible>,
    /// The source.
    pub module: &'a ShaderModule,
    /// The name of the entry point; `None` for the only one.
    pub entry_point: Option<&'a str>,
    /// Unused.
    pub compilation_options: PipelineCompilationOptions,
    /// Unused: the browser caches compiled kernels.
    pub cache: Option<&'a std::convert::Infallible>,
}

/// Compilation options; empty.
#[derive(Debug, Clone, Copy, Default)]
pub struct PipelineCompilationOptions {}

/// A compiled entry point; `None` after an error, which the surrounding scope captures.
#[derive(Debug)]
pub struct ComputePipeline(pub(crate) Option<Object>);

impl ComputePipeline {
    /// Returns the layout of bind group 0, the only one.
    pub fn get_bind_group_layout(&self, _group: u32) -> BindGroupLayout {
        BindGroupLayout(Object(crate::imports::layout(number(self))))
    }
}

/// Returns the worker's number of a pipeline.
pub(crate) fn number(pipeline: &ComputePipeline) -> u32 {
    pipeline.0.as_ref().map_or(0, |object| object.0)
}

/// Layout of the bindings of an entry point.
#[derive(Debug)]
pub struct BindGroupLayout(pub(crate) Object);
