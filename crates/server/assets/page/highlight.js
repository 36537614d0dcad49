// Highlighting of code blocks: a language is its words, its comments and its strings; one expression
// finds all three, and numbers. Unfinished strings and comments end with the code, as in a stream.

const WORDS = {
  js: `abstract as async await break case catch class const continue debugger declare default delete do else enum export extends false
    finally for from function get if implements import in instanceof interface keyof let namespace new null of private protected public
    readonly return satisfies set static super switch this throw true try type typeof undefined var void while with yield`,
  python: `False None True and as assert async await break case class continue def del elif else except finally for from global if import in
    is lambda match nonlocal not or pass raise return self try while with yield`,
  rust: `Self as async await box break const continue crate dyn else enum extern false fn for if impl in let loop macro match mod move mut
    pub ref return self static struct super trait true type union unsafe use where while bool char f32 f64 i8 i16 i32 i64 i128 isize str u8
    u16 u32 u64 u128 usize`,
  c: `alignas alignof auto bool break case catch char class concept const consteval constexpr continue co_await co_return co_yield decltype
    default delete do double else enum explicit export extern false final float for friend goto if inline int long mutable namespace
    new noexcept nullptr operator override private protected public register requires restrict return short signed sizeof static struct
    switch template this throw true try typedef typename union unsigned using virtual void volatile while`,
  java: `abstract as assert base bool boolean break byte case catch char class const continue data decimal default delegate do double else
    enum event extends false final finally float for foreach fun get if implements import in init instanceof int interface internal is
    lock long namespace new null object open out override package params private protected public readonly record ref return sealed set
    short static string struct super switch synchronized this throw throws transient true try typeof using val var virtual void volatile
    when where while yield`,
  go: `any bool break byte case chan const continue default defer else error fallthrough false float32 float64 for func go goto if import int
    int32 int64 interface map nil package range return rune select string struct switch true type uint uint64 var`,
  ruby: `alias and begin break case class def defined do else elsif end ensure false for if in module next nil not or redo require rescue retry
    return self super then true undef unless until when while yield`,
  php: `abstract and array as break case catch class clone const continue declare default do echo else elseif enum extends false final finally
    fn for foreach function global if implements instanceof interface match namespace new null or private protected public readonly
    return static switch this throw trait true try use var while yield`,
  swift: `Any Self actor as associatedtype async await break case catch class continue default defer deinit do else enum extension false
    fileprivate for func guard if import in init inout internal is lazy let mutating nil open override private protocol public repeat
    rethrows return self some static struct subscript super switch throw throws true try typealias var weak where while`,
  shell: `alias case cd do done echo elif else esac eval exec exit export fi for function if in local read readonly return set shift source
    then trap unset until while`,
  sql: `add all alter and as asc begin between by case cast check column commit constraint create cross default delete desc distinct drop else
    end exists false foreign from full group having if in index inner insert into is join key left like limit not null offset on or
    order outer over partition primary references returning right rollback select set table then true union unique update using
    values view when where with`,
  lua: 'and break do else elseif end false for function goto if in local nil not or repeat return then true until while',
  data: 'true false null yes no on off',
};

// The end of the code: "$" is that of a line here.
const END = '(?![^])';
const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|${END})`, HASHES = String.raw`#[^\n]*`, DASHES = String.raw`--[^\n]*`;
const quoted = quote => String.raw`${quote}(?:\\[^]|[^\\\n${quote}])*(?:${quote}|\\?${END}|(?=\n))`;
const long = quote => `${quote}[^]*?(?:${quote}|${END})`;
const DOUBLE = quoted('"'), SINGLE = quoted("'"), TICKS = `\`(?:\\\\[^]|[^\\\\\`])*(?:\`|\\\\?${END})`;
const CHARACTER = String.raw`'(?:\\[^\n']+|[^\\\n'])'`;
const NUMBER = String.raw`\b0[xXbBoO][\da-fA-F_]+\w*|\b\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?[a-zA-Z%]*`;

/** Returns a language; `keys` finds further keywords: tags, properties, preprocessor lines. */
function language(words, comment, strings, keys) {
  const parts = [['comment', comment], ['key', keys], ['string', strings.join('|')], ['number', NUMBER], ['word', String.raw`[A-Za-z_]\w*`]];
  const source = parts.filter(([, part]) => part).map(([name, part]) => `(?<${name}>${part})`).join('|');
  return { words: new Set(WORDS[words]?.split(/\s+/)), pattern: new RegExp(source, 'gm'), ignoresCase: words === 'sql' };
}

const LANGUAGES = {
  'js javascript jsx ts typescript tsx mjs': language('js', SLASHES, [DOUBLE, SINGLE, TICKS]),
  'python py python3': language('python', HASHES, [long('"""'), long("'''"), DOUBLE, SINGLE], String.raw`^[ \t]*@[\w.]+`),
  'rust rs': language('rust', SLASHES, [String.raw`"(?:\\[^]|[^\\"])*(?:"|\\?${END})`, CHARACTER], String.raw`\b\w+!(?=[\s([{])|#!?\[[^\]\n]*\]`),
  'c cpp c++ h hpp cc cuda objc glsl': language('c', SLASHES, [DOUBLE, CHARACTER], String.raw`^[ \t]*#\s*\w+`),
  'java kotlin kt csharp cs c# scala dart groovy': language('java', SLASHES, [long('"""'), DOUBLE, SINGLE], String.raw`@\w+`),
  'go golang': language('go', SLASHES, [DOUBLE, TICKS, CHARACTER]),
  'ruby rb': language('ruby', HASHES, [DOUBLE, SINGLE], String.raw`[:@]\w+`),
  php: language('php', `${SLASHES}|${HASHES}`, [DOUBLE, SINGLE], String.raw`<\?(?:php|=)?|\?>|\$\w+`),
  swift: language('swift', SLASHES, [long('"""'), DOUBLE], String.raw`@\w+`),
  'bash sh shell zsh console dockerfile makefile powershell': language('shell', String.raw`(?<![^\s;])#[^\n]*`, [DOUBLE, `'[^']*(?:'|${END})`], String.raw`\$\{?\w+\}?`),
  'sql sqlite postgresql mysql': language('sql', `${DASHES}|${SLASHES}`, [SINGLE, DOUBLE]),
  lua: language('lua', String.raw`--\[\[[^]*?(?:\]\]|${END})|${DASHES}`, [DOUBLE, SINGLE]),
  'json json5 jsonc': language('data', SLASHES, [DOUBLE], String.raw`"(?:\\.|[^"\\\n])*"(?=\s*:)`),
  'yaml yml toml ini': language('data', String.raw`(?<!\S)[#;][^\n]*`, [DOUBLE, SINGLE], String.raw`^[ \t]*(?:- )?[\w.-]+(?=\s*[:=])|^[ \t]*\[[^\]\n]*\]`),
  'html xml svg vue': language('', `<!--[^]*?(?:-->|${END})`, [DOUBLE], String.raw`<[\/!?]?[A-Za-z][\w:-]*|[\/?]?>`),
  'css scss less': language('', SLASHES, [DOUBLE, SINGLE], String.raw`@[\w-]+|(?<![\w-])[\w-]+(?=[ \t]*:\s)|#[\da-fA-F]{3,8}\b`),
};

const languages = new Map(Object.entries(LANGUAGES).flatMap(([names, value]) => names.split(' ').map(name => [name, value])));
/** Returns the texts and spans of a code. */
function highlight(code, name) {
  if (name === 'diff' || name === 'patch') return highlightDiff(code);
  const found = languages.get(name.toLowerCase());
  if (!found || code.length > 100_000) return [code];
  const out = [];
  let at = 0;
  for (const match of code.matchAll(found.pattern)) {
    const kind = kindOf(match, found);
    if (!kind) continue;
    if (match.index > at) out.push(code.slice(at, match.index));
    out.push(el('span', { class: kind }, match[0]));
    at = match.index + match[0].length;
  }
  return [...out, code.slice(at)];
}

function kindOf({ groups: g }, { words, ignoresCase }) {
  if (g.comment !== undefined) return 'c-comment';
  if (g.string !== undefined) return 'c-string';
  if (g.number !== undefined) return 'c-number';
  return g.key !== undefined || words.has(ignoresCase ? g.word.toLowerCase() : g.word) ? 'c-key' : '';
}

function highlightDiff(code) {
  const kinds = { '+': 'c-added', '-': 'c-removed', '@': 'c-key' };
  return code.split(/(?<=\n)/).map(line => kinds[line[0]] ? el('span', { class: kinds[line[0]] }, line) : line);
}
