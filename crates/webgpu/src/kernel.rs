//! Sources and what they are compiled to.

use std::borrow::Cow;

use crate::imports::Object;

/// A source to be read.
#[derive(Debug)]
pub struct ShaderModuleDescriptor<'a> {
    /// Its name; not handed on.
    pub label: Option<&'a str>,
    /// Its text.
    pub source: ShaderSource<'a>,
}

/// A text of kernels.
#[derive(Debug)]
pub enum ShaderSource<'a> {
    /// In WGSL, which the browser compiles.
    Wgsl(Cow<'a, str>),
}

/// A source that was read.
#[derive(Debug)]
pub struct ShaderModule(pub(crate) Object);

impl ShaderModule {
    /// What is to be said of it; waits until it is read.
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

/// What is to be said of a source.
#[derive(Debug)]
pub struct CompilationInfo {
    /// Its first fault, where it has one.
    pub messages: Vec<CompilationMessage>,
}

/// A fault of a source.
#[derive(Debug)]
pub struct CompilationMessage {
    /// What is wrong.
    pub message: String,
    /// How bad it is.
    pub message_type: CompilationMessageType,
    /// Where it is.
    pub location: Option<SourceLocation>,
}

/// How bad something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompilationMessageType {
    /// It does not compile.
    Error,
}

/// A place in a source.
#[derive(Debug, Clone, Copy)]
pub struct SourceLocation {
    /// Its line, from 1.
    pub line_number: u32,
}

/// An entry point to be compiled.
#[derive(Debug)]
pub struct ComputePipelineDescriptor<'a> {
    /// Its name; not handed on.
    pub label: Option<&'a str>,
    /// What it binds: as the source says.
    pub layout: Option<&'a std::convert::Infallible>,
    /// The source.
    pub module: &'a ShaderModule,
    /// The entry point's name; the only one where nothing is said.
    pub entry_point: Option<&'a str>,
    /// Nothing.
    pub compilation_options: PipelineCompilationOptions,
    /// The browser keeps what it compiles by itself.
    pub cache: Option<&'a std::convert::Infallible>,
}

/// Nothing that could be chosen.
#[derive(Debug, Clone, Copy, Default)]
pub struct PipelineCompilationOptions {}

/// An entry point, ready to run; `None` where it was refused, which the scope around it tells.
#[derive(Debug)]
pub struct ComputePipeline(pub(crate) Option<Object>);

impl ComputePipeline {
    /// What the entry point binds in group 0, the only one.
    pub fn get_bind_group_layout(&self, _group: u32) -> BindGroupLayout {
        BindGroupLayout(Object(crate::imports::layout(number(self))))
    }
}

/// The worker's number of a pipeline.
pub(crate) fn number(pipeline: &ComputePipeline) -> u32 {
    pipeline.0.as_ref().map_or(0, |object| object.0)
}

/// What an entry point binds.
#[derive(Debug)]
pub struct BindGroupLayout(pub(crate) Object);
