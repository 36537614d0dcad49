//! Parses PTX text to modules: variables, kernels, registers and labels.

use std::collections::HashMap;

use crate::ParseError;
use crate::decode::decode;
use crate::inst::{Addr, Dst, Inst, Op, Special, Src};
use crate::memory::{LOCAL_BASE, PARAM_BASE, SHARED_BASE};

/// A variable of the module, in global or constant memory.
#[derive(Debug)]
pub(crate) struct Variable {
    pub name: String,
    pub bytes: Vec<u8>,
}

/// A kernel.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub insts: Vec<Inst>,
    pub n_regs: usize,
    pub param_bytes: usize,
    /// Static shared memory.
    pub shared_bytes: usize,
    /// Offset of the dynamic shared memory of a launch.
    pub dynamic_at: usize,
    /// `.maxntid`: maximum threads of a block.
    pub max_threads: Option<u32>,
    /// `.minnctapersm`: minimum blocks of a multiprocessor.
    pub min_blocks: u32,
    pub local_bytes: usize,
    /// Whether it has `griddepcontrol.wait`, and may begin before the kernels before it end.
    pub waits: bool,
}

/// A statement, a label, or the start or end of a scope.
enum Item {
    Statement(String),
    Label(String),
    Open(String),
    Close,
}

/// Splits the text into items with their lines.
fn items(text: &str) -> Result<Vec<(usize, Item)>, ParseError> {
    let (mut items, mut buffer, mut line, mut started, mut vector) = (Vec::new(), String::new(), 1, 1, false);
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if buffer.trim().is_empty() {
            started = line;
        }
        match c {
            '\n' => {
                line += 1;
                buffer.push(' ');
            }
            '/' if rest.peek() == Some(&'/') => {
                while rest.peek().is_some_and(|&c| c != '\n') {
                    rest.next();
                }
            }
            '{' if buffer.trim().is_empty() || buffer.contains(".entry") || buffer.contains(".func") => {
                items.push((started, Item::Open(std::mem::take(&mut buffer).trim().to_owned())));
            }
            '{' => {
                vector = true;
                buffer.push(c);
            }
            '}' if vector => {
                vector = false;
                buffer.push(c);
            }
            '}' => items.push((started, Item::Close)),
            ';' => items.push((started, Item::Statement(std::mem::take(&mut buffer).trim().to_owned()))),
            ':' if is_name(buffer.trim()) => {
                items.push((started, Item::Label(std::mem::take(&mut buffer).trim().to_owned())));
            }
            _ => buffer.push(c),
        }
        // Directives that end with their line.
        let word = buffer.trim_start();
        if c == '\n' && [".version", ".target", ".address_size", ".file"].iter().any(|d| word.starts_with(d))
        {
            buffer.clear();
        }
    }
    match buffer.trim() {
        "" => Ok(items),
        left => Err(ParseError { line: started, what: format!("an unfinished statement: {left}") }),
    }
}

fn is_name(text: &str) -> bool {
    let mut chars = text.chars();
    chars.next().is_some_and(|c| c.is_alphabetic() || "$_%".contains(c))
        && chars.all(|c| c.is_alphanumeric() || "$_".contains(c))
}

/// Parses the module-level variables of `text`.
pub(crate) fn variables(text: &str) -> Result<Vec<Variable>, ParseError> {
    let (mut depth, mut found) = (0, Vec::new());
    for (line, item) in items(text)? {
        match item {
            Item::Open(_) => depth += 1,
            Item::Close => depth -= 1,
            Item::Statement(text) if depth == 0 && (words(&text, ".const") || words(&text, ".global")) => {
                found.push(variable(&text).ok_or(ParseError { line, what: text })?);
            }
            _ => {}
        }
    }
    Ok(found)
}

fn words(text: &str, word: &str) -> bool {
    text.split_whitespace().take(3).any(|part| part == word)
}

/// Parses `.global .align 4 .f32 book[8] = {1, 2}`.
fn variable(text: &str) -> Option<Variable> {
    let (declared, init) = text.split_once('=').map_or((text, None), |(d, i)| (d, Some(i)));
    let (name, size) = declare(declared)?;
    let ty = declared.split_whitespace().find_map(|word| crate::inst::Ty::parse(word.strip_prefix('.')?))?;
    let mut bytes = vec![0; size];
    if let Some(init) = init {
        let values = init.trim().trim_start_matches('{').trim_end_matches('}').split(',');
        for (slot, value) in bytes.chunks_exact_mut(ty.bytes()).zip(values) {
            slot.copy_from_slice(&number(value.trim())?.to_le_bytes()[..ty.bytes()]);
        }
    }
    Some(Variable { name, bytes })
}

/// Parses the name and the size in bytes of `... .b8 name[N]` or `... .u32 name`.
fn declare(text: &str) -> Option<(String, usize)> {
    let text = text.trim();
    let ty = text.split_whitespace().find_map(|word| crate::inst::Ty::parse(word.strip_prefix('.')?))?;
    let last = text.split_whitespace().last()?;
    let (name, count) = match last.split_once('[') {
        Some((name, count)) => (name, count.trim_end_matches(']').parse().unwrap_or(0)),
        None => (last, 1),
    };
    Some((name.to_owned(), count * ty.bytes()))
}

/// Parses `.align N` of a declaration.
fn alignment(text: &str) -> usize {
    let mut parts = text.split_whitespace();
    parts.find(|&part| part == ".align").and_then(|_| parts.next()?.parse().ok()).unwrap_or(8)
}

/// Parses `.maxntid x, y, z` among the directives behind the parameters; returns the product.
fn max_threads(text: &str) -> Option<u32> {
    let numbers = text.split_once(".maxntid")?.1.split('.').next()?;
    numbers.split(',').map(|n| n.trim().parse::<u32>().ok()).product()
}

/// Parses `.minnctapersm n`.
fn min_blocks(text: &str) -> u32 {
    let number = text.split_once(".minnctapersm").and_then(|(_, rest)| rest.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(1)
}

/// Parses a number: decimal, hexadecimal, or a float by its bits.
pub(crate) fn number(text: &str) -> Option<u64> {
    if let Some(bits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        return u32::from_str_radix(bits, 16).ok().map(u64::from);
    }
    if let Some(bits) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        return u64::from_str_radix(bits, 16).ok();
    }
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
    let digits = digits.trim_end_matches('U');
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}

/// Parses the kernels of `text`, whose variables are at `symbols`.
pub(crate) fn kernels(
    text: &str,
    symbols: &HashMap<String, u64>,
) -> Result<HashMap<String, Kernel>, ParseError> {
    let (mut kernels, mut body, mut dynamic) = (HashMap::new(), None::<(String, Body)>, Vec::new());
    for (line, item) in items(text)? {
        let fail = |what: String| ParseError { line, what };
        match (item, &mut body) {
            (Item::Open(head), None) => {
                let (name, body_of) = Body::new(&head, symbols, &dynamic).ok_or_else(|| fail(head))?;
                body = Some((name, body_of));
            }
            (Item::Open(_), Some((_, body))) => body.scopes.push(Vec::new()),
            (Item::Close, Some((_, open))) if open.scopes.len() > 1 => open.close_scope(),
            (Item::Close, _) => {
                let (name, body) = body.take().ok_or_else(|| fail("}".to_owned()))?;
                kernels.insert(name, body.finish()?);
            }
            (Item::Label(label), Some((_, body))) => {
                body.labels.insert(label, body.insts.len());
            }
            (Item::Statement(text), Some((_, body))) => {
                body.statement(&text, line).map_err(|what| fail(format!("{what}: {text}")))?;
            }
            (Item::Statement(text), None) if text.contains(".extern .shared") => {
                let alignment = alignment(&text);
                dynamic.push((declare(&text).ok_or_else(|| fail(text))?.0, alignment));
            }
            (Item::Statement(text), None) if words(&text, ".const") || words(&text, ".global") => {}
            (Item::Statement(what) | Item::Label(what), None) => return Err(fail(what)),
        }
    }
    Ok(kernels)
}

/// A kernel under construction.
pub(crate) struct Body {
    kernel: Kernel,
    insts: Vec<Inst>,
    symbols: HashMap<String, u64>,
    /// Names of the dynamic shared memory, and their alignments.
    dynamic: Vec<(String, usize)>,
    regs: HashMap<String, u32>,
    /// For each open scope, the names it has shadowed or added.
    scopes: Vec<Vec<(String, Option<u32>)>>,
    labels: HashMap<String, usize>,
    /// Branches with unresolved labels: index and label.
    branches: Vec<(usize, String)>,
}

impl Body {
    fn new(
        head: &str,
        symbols: &HashMap<String, u64>,
        dynamic: &[(String, usize)],
    ) -> Option<(String, Self)> {
        let (before, after) = head.split_once(".entry")?.1.split_once('(')?;
        let (params, limits) = after.split_once(')')?;
        let mut symbols = symbols.clone();
        let mut param_bytes = 0_usize;
        for param in params.split(',').map(str::trim).filter(|param| !param.is_empty()) {
            let (name, bytes) = declare(param)?;
            param_bytes = param_bytes.next_multiple_of(alignment(param).min(bytes.next_power_of_two()));
            symbols.insert(name, PARAM_BASE + param_bytes as u64);
            param_bytes += bytes;
        }
        let kernel = Kernel {
            insts: Vec::new(),
            n_regs: 0,
            param_bytes,
            shared_bytes: 0,
            dynamic_at: 0,
            max_threads: max_threads(limits),
            min_blocks: min_blocks(limits),
            local_bytes: 0,
            waits: false,
        };
        let body = Self {
            kernel,
            insts: Vec::new(),
            symbols,
            dynamic: dynamic.to_vec(),
            regs: HashMap::new(),
            scopes: vec![Vec::new()],
            labels: HashMap::new(),
            branches: Vec::new(),
        };
        Some((before.trim().to_owned(), body))
    }

    fn close_scope(&mut self) {
        for (name, before) in self.scopes.pop().unwrap_or_default().into_iter().rev() {
            match before {
                Some(reg) => self.regs.insert(name, reg),
                None => self.regs.remove(&name),
            };
        }
    }

    fn add_reg(&mut self, name: String) {
        let index = self.kernel.n_regs as u32;
        self.kernel.n_regs += 1;
        let before = self.regs.insert(name.clone(), index);
        if let Some(scope) = self.scopes.last_mut() {
            scope.push((name, before));
        }
    }

    fn statement(&mut self, text: &str, line: usize) -> Result<(), String> {
        let unread = || "a declaration that cannot be read".to_owned();
        if let Some(rest) = text.strip_prefix(".reg") {
            let names = rest.trim().split_once(char::is_whitespace).ok_or_else(unread)?.1;
            for name in names.split(',').map(str::trim) {
                match name.split_once('<') {
                    Some((prefix, count)) => {
                        let count: usize = count.trim_end_matches('>').parse().map_err(|_| unread())?;
                        (0..count).for_each(|i| self.add_reg(format!("{prefix}{i}")));
                    }
                    None => self.add_reg(name.to_owned()),
                }
            }
            return Ok(());
        }
        if text.starts_with(".shared") || text.starts_with(".local") {
            let (name, bytes) = declare(text).ok_or_else(unread)?;
            let (size, base) = match text.starts_with(".shared") {
                true => (&mut self.kernel.shared_bytes, SHARED_BASE),
                false => (&mut self.kernel.local_bytes, LOCAL_BASE),
            };
            *size = size.next_multiple_of(alignment(text));
            self.symbols.insert(name, base + *size as u64);
            *size += bytes;
            return Ok(());
        }
        if text.starts_with(".pragma") || text.starts_with(".loc") {
            return Ok(());
        }
        let (guard, text) = match text.strip_prefix('@') {
            Some(rest) => {
                let (name, rest) = rest.split_once(char::is_whitespace).ok_or("a guard alone")?;
                let (negated, name) = name.strip_prefix('!').map_or((false, name), |name| (true, name));
                (Some((self.reg(name)?, negated)), rest.trim())
            }
            None => (None, text),
        };
        let (name, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let operands = split(operands);
        let mods: Vec<&str> = name.split('.').collect();
        if mods[0] == "bra" {
            self.branches.push((self.insts.len(), operands.join("")));
        }
        let op = decode(self, &mods, &operands)?;
        self.insts.push(Inst { guard, op, line });
        Ok(())
    }

    fn finish(mut self) -> Result<Kernel, ParseError> {
        for (index, label) in std::mem::take(&mut self.branches) {
            let line = self.insts[index].line;
            let target = self.labels.get(&label);
            let target = *target.ok_or_else(|| ParseError { line, what: format!("no label {label}") })?;
            self.insts[index].op = Op::Bra(target);
        }
        // A kernel may end without `ret`, and labels may stand at its end.
        self.insts.push(Inst { guard: None, op: Op::Exit, line: 0 });
        self.kernel.waits = self.insts.iter().any(|inst| matches!(inst.op, Op::WaitForKernels));
        self.kernel.insts = self.insts;
        // The declared alignment, and no more.
        let alignment = self.dynamic.iter().map(|(_, alignment)| *alignment).max().unwrap_or(1);
        self.kernel.dynamic_at = self.kernel.shared_bytes.next_multiple_of(alignment);
        Ok(self.kernel)
    }

    pub fn reg(&self, name: &str) -> Result<u32, String> {
        self.regs.get(name).copied().ok_or_else(|| format!("no register {name}"))
    }

    /// Parses a register to write, or the sink.
    pub fn dst(&self, text: &str) -> Result<Dst, String> {
        if text == "_" { Ok(None) } else { self.reg(text).map(Some) }
    }

    /// Parses a register, a special register, a number or a symbol.
    pub fn src(&self, text: &str) -> Result<Src, String> {
        if let Some(name) = text.strip_prefix('!') {
            return self.reg(name).map(Src::Not);
        }
        if let Some(&reg) = self.regs.get(text) {
            return Ok(Src::Reg(reg));
        }
        if let Some(special) = special(text) {
            return Ok(Src::Special(special));
        }
        if let Some(&address) = self.symbols.get(text) {
            return Ok(Src::Imm(address));
        }
        if self.dynamic.iter().any(|(name, _)| name == text) {
            return Ok(Src::Special(Special::DynamicShared));
        }
        number(text).map(Src::Imm).ok_or_else(|| format!("an operand that is not known, {text}"))
    }

    /// Parses `[base]`, `[base+4]`, `[base+-4]`.
    pub fn addr(&self, text: &str) -> Result<Addr, String> {
        let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        let inner = inner.ok_or_else(|| format!("no address, {text}"))?.trim();
        let (base, offset) = match inner.split_once('+') {
            Some((base, offset)) => {
                (base.trim(), number(offset.trim()).ok_or_else(|| format!("an offset, {offset}"))? as i64)
            }
            None => (inner, 0),
        };
        Ok(Addr { base: self.src(base)?, offset })
    }

    /// Returns the elements of `{a, b}`, or the operand alone.
    pub fn parts<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}'));
        inner.map_or_else(|| vec![text], |inner| inner.split(',').map(str::trim).collect())
    }
}

fn special(text: &str) -> Option<Special> {
    let axis = |text: &str| "xyz".find(text);
    Some(match text.strip_prefix('%')?.split_once('.') {
        Some(("tid", a)) => Special::Tid(axis(a)?),
        Some(("ntid", a)) => Special::Ntid(axis(a)?),
        Some(("ctaid", a)) => Special::Ctaid(axis(a)?),
        Some(("nctaid", a)) => Special::Nctaid(axis(a)?),
        Some(_) => return None,
        None => match &text[1..] {
            "laneid" => Special::Lane,
            "warpid" => Special::Warp,
            "lanemask_lt" => Special::LanemaskLt,
            "lanemask_le" => Special::LanemaskLe,
            "lanemask_eq" => Special::LanemaskEq,
            "lanemask_ge" => Special::LanemaskGe,
            "lanemask_gt" => Special::LanemaskGt,
            "clock" | "clock64" | "globaltimer" => Special::Clock,
            _ => return None,
        },
    })
}

/// Splits operands at commas outside braces and brackets.
fn split(text: &str) -> Vec<String> {
    let (mut depth, mut parts, mut part) = (0, Vec::new(), String::new());
    for c in text.chars() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(std::mem::take(&mut part).trim().to_owned());
                continue;
            }
            _ => {}
        }
        part.push(c);
    }
    if !part.trim().is_empty() {
        parts.push(part.trim().to_owned());
    }
    parts
}
