// Math: the LaTeX that models write, as MathML. A command that is unknown is shown as its source, and
// so is a formula that does not parse.

const MATHML = 'http://www.w3.org/1998/Math/MathML';

function ml(tag, props, ...children) {
  const node = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const pairs = text => new Map(text.trim().split(/\s+/).map((word, i, all) => i % 2 ? [] : [word, all[i + 1]]).filter(pair => pair.length));

const LETTERS = pairs(`alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ
  nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ
  Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ Re ℜ Im ℑ aleph ℵ emptyset ∅
  varnothing ∅ imath ı jmath ȷ top ⊤ bot ⊥ angle ∠ triangle △ square □ degree ° ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯
  prime ′ checkmark ✓ star ⋆ bullet • S § % % $ $ # # & & _ _`);
const OPERATORS = pairs(`times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ circ ∘ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ wedge ∧ land ∧ vee ∨ lor ∨ cap ∩
  cup ∪ setminus ∖ backslash ∖ le ≤ leq ≤ leqslant ≤ ge ≥ geq ≥ geqslant ≥ ne ≠ neq ≠ lt < gt > ll ≪ gg ≫ equiv ≡ approx ≈ sim ∼ simeq ≃ cong ≅
  propto ∝ to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ impliedby ⟸ iff ⟺
  longrightarrow ⟶ Longrightarrow ⟹ mapsto ↦ uparrow ↑ downarrow ↓ hookrightarrow ↪ rightharpoonup ⇀ in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃
  subseteq ⊆ supseteq ⊇ subsetneq ⊊ forall ∀ exists ∃ nexists ∄ neg ¬ lnot ¬ mid ∣ nmid ∤ parallel ∥ perp ⟂ models ⊨ vdash ⊢ therefore ∴
  because ∵ colon : prec ≺ succ ≻ triangleq ≜ coloneqq ≔ dagger † ltimes ⋉ rtimes ⋊ bmod mod`);
const LARGE = pairs(`sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀ bigsqcup ⨆`);
const FENCES = pairs(`{ { } } lbrace { rbrace } langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ vert | Vert ‖ | ‖ lvert | rvert | lVert ‖ rVert ‖
  lbrack [ rbrack ]`);
const ACCENTS = pairs(`hat ^ widehat ^ bar ¯ vec → overrightarrow → dot ˙ ddot ¨ tilde ~ widetilde ~ check ˇ breve ˘ acute ´ grave \` overbrace ⏞`);
const UNDER = pairs('underbrace ⏟');
const SPACES = pairs(', .17 : .22 > .22 ; .28 ! -.17 quad 1 qquad 2 enspace .5 thinspace .17');
const FUNCTIONS = new Set(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker deg gcd lcm hom arg Pr lim
  max min sup inf limsup liminf argmax argmin`.split(/\s+/));
const LIMITS = /^(lim|max|min|sup|inf|limsup|liminf|argmax|argmin|det|gcd|Pr)$/;
// Environments, with their left and right fences.
const TABLES = { matrix: ['', ''], smallmatrix: ['', ''], pmatrix: ['(', ')'], bmatrix: ['[', ']'], Bmatrix: ['{', '}'], vmatrix: ['|', '|'], Vmatrix: ['‖', '‖'],
  cases: ['{', ''], array: ['', ''], aligned: ['', ''], align: ['', ''], split: ['', ''], gathered: ['', ''], gather: ['', ''], equation: ['', ''], eqnarray: ['', ''] };

// Alphabets: the code points of A, a and 0, and the letters that are elsewhere.
const ALPHABETS = {
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce], boldsymbol: [0x1d468, 0x1d482, 0x1d7ce], mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2], mathtt: [0x1d670, 0x1d68a, 0x1d7f6],
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, 'CℂHℍNℕPℙQℚRℝZℤ'], mathcal: [0x1d49c, 0x1d4b6, 0, 'BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ'], mathfrak: [0x1d504, 0x1d51e, 0, 'CℭHℌIℑRℜZℨ'],
};
Object.assign(ALPHABETS, { bm: ALPHABETS.boldsymbol, mathscr: ALPHABETS.mathcal });

function inAlphabet(text, [upper, lower, digit, others = '']) {
  return text.replace(/[A-Za-z0-9]/g, letter => {
    const at = others.indexOf(letter), base = letter >= 'a' ? [lower, 97] : letter >= 'A' ? [upper, 65] : [digit, 48];
    return at >= 0 ? others[at + 1] : base[0] ? String.fromCodePoint(base[0] + letter.charCodeAt(0) - base[1]) : letter;
  });
}

// A bracket that is no fence.
const FLAT = { stretchy: 'false', lspace: '0', rspace: '0' };
const TOKENS = /\\(?:[a-zA-Z]+\*?|[^])|\d+(?:[.,]\d+)*|\s+|[^]/gu;

/** Parses a formula. A node has `moves` if its scripts are limits, above and below it. */
class Formula {
  constructor(source, isDisplay) {
    Object.assign(this, { tokens: source.match(TOKENS) ?? [], at: 0, depth: 0, isDisplay });
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? '')) this.at++;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    if (token === undefined) throw new Error('the formula ends early');
    this.at++;
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new Error(`expected ${token}`);
  }

  /** Returns the nodes up to one of `ends`, which stays; `undefined` is the end of the formula. */
  row(...ends) {
    if (++this.depth > 40) throw new Error('nested too deeply');
    const nodes = [];
    for (let token = this.peek(); token !== undefined && !ends.includes(token); token = this.peek()) {
      if (/^([}&]|\\\\|\\right|\\end)$/.test(token)) throw new Error(`unexpected ${token}`);
      const isOperand = nodes.length && !(nodes.at(-1).tagName === 'mo' && !/^[)\]|⟩}!]$/.test(nodes.at(-1).textContent));
      nodes.push(this.scripts(this.atom()));
      if (!isOperand && /^[−+±∓]$/.test(nodes.at(-1).textContent)) nodes.at(-1).setAttribute('form', 'prefix');
    }
    if (ends.length && !ends.includes(undefined) && this.peek() === undefined) throw new Error('unclosed');
    this.depth--;
    return nodes;
  }

  group(...ends) {
    const nodes = this.row(...ends);
    return nodes.length === 1 ? nodes[0] : ml('mrow', {}, ...nodes);
  }

  /** Returns an argument: a group or one atom. */
  argument() {
    if (this.peek() !== '{') return this.nested(() => this.atom());
    this.next();
    const group = this.group('}');
    this.next();
    return group;
  }

  nested(parse) {
    if (++this.depth > 40) throw new Error('nested too deeply');
    const node = parse();
    this.depth--;
    return node;
  }

  /** Returns the source of an argument. */
  text() {
    if (this.peek() !== '{') return this.next();
    let [out, open] = ['', 1];
    for (this.at++; open; this.at++) {
      const token = this.tokens[this.at];
      if (token === undefined) throw new Error('unclosed');
      open += (token === '{') - (token === '}');
      if (open) out += token.replace(/^\\([^a-zA-Z])$/, '$1');
    }
    return out;
  }

  scripts(base) {
    let below, above, primes = '';
    for (;;) {
      const token = this.peek();
      if (token === '_' && !below) { this.next(); below = this.argument(); }
      else if (token === '^' && !above) { this.next(); above = this.argument(); }
      else if (token === "'") { this.next(); primes += '′'; }
      else if (token === '\\limits' || token === '\\nolimits') { this.next(); base.moves = token === '\\limits'; }
      else break;
    }
    if (primes) above = ml('mrow', {}, ml('mo', {}, primes), ...(above ? [above] : []));
    if (!below && !above) return base;
    const kind = base.moves ? ['munder', 'mover', 'munderover'] : ['msub', 'msup', 'msubsup'];
    const given = [below, above].filter(Boolean);
    return ml(kind[given.length === 2 ? 2 : above ? 1 : 0], {}, base, ...given);
  }

  atom() {
    const token = this.next();
    if (token === '{') { const group = this.group('}'); this.next(); return group; }
    if (token[0] === '\\') return this.command(token.slice(1));
    if (/^\d/.test(token)) return ml('mn', {}, token);
    if (/^\p{L}$/u.test(token)) return ml('mi', {}, token);
    if (token === '^' || token === '_') { this.at--; return ml('mrow', {}); }
    if (token === '~') return ml('mspace', { width: '.33em' });
    return ml('mo', /^[()[\]|/]$/.test(token) ? FLAT : {}, token === '-' ? '−' : token === '*' ? '∗' : token);
  }

  command(name) {
    if (LETTERS.has(name)) return ml('mi', /^[Α-Ω]$/.test(LETTERS.get(name)) ? { mathvariant: 'normal' } : {}, LETTERS.get(name));
    if (OPERATORS.has(name)) return ml('mo', {}, OPERATORS.get(name));
    if (FENCES.has(name)) return ml('mo', FLAT, FENCES.get(name));
    if (SPACES.has(name) || name === ' ') return ml('mspace', { width: `${SPACES.get(name) ?? .33}em` });
    if (ACCENTS.has(name)) return this.accent(ml('mover', { accent: 'true' }, this.argument(), ml('mo', { stretchy: `${name.length > 5}` }, ACCENTS.get(name))), name);
    if (UNDER.has(name)) return this.accent(ml('munder', {}, this.argument(), ml('mo', { stretchy: 'true' }, UNDER.get(name))), name);
    if (FUNCTIONS.has(name)) return this.named(name.replace(/^(lim|arg)(?=[smi])/, '$1 '), LIMITS.test(name));
    if (LARGE.has(name)) {
      const node = ml('mo', { largeop: 'true', movablelimits: 'false' }, LARGE.get(name));
      node.moves = this.isDisplay && !name.endsWith('int');
      return node;
    }
    if (Object.hasOwn(ALPHABETS, name)) return ml('mi', {}, inAlphabet(this.text(), ALPHABETS[name]));
    if (/^(displaystyle|textstyle|scriptstyle|limits|nolimits|nonumber|notag|label|tag\*?|phantom)$/.test(name)) {
      if (/^(label|tag|phantom)/.test(name)) this.text();
      return ml('mrow', {});
    }
    return (Object.hasOwn(COMMANDS, name) ? COMMANDS[name] : unknown)(this, name);
  }

  accent(node, name) {
    node.moves = name.endsWith('brace');
    return node;
  }

  named(name, takesLimits) {
    // An operator has the space around it that a function needs.
    const node = ml('mo', { form: 'prefix', lspace: '.1em', rspace: '.17em' }, name);
    node.moves = this.isDisplay && takesLimits;
    return node;
  }

  /** Reads a fence: "(", "\{" or "." for none. */
  fence() {
    const token = this.next();
    return token === '.' ? '' : token[0] === '\\' ? FENCES.get(token.slice(1)) ?? '' : token;
  }

  /** Reads the rows of an environment. */
  table(name) {
    const base = name.replace('*', '');
    if (!Object.hasOwn(TABLES, base)) throw new Error('an unknown environment');
    if (base === 'array') this.text();
    const isAligned = /^(align|aligned|split|eqnarray)$/.test(base), rows = [[]];
    for (;;) {
      const side = isAligned ? ['right', 'left'][rows.at(-1).length % 2] : base === 'cases' ? 'left' : 'center';
      rows.at(-1).push(ml('mtd', { style: `text-align: ${side}; text-align: -webkit-${side}` }, ml('mrow', {}, ...this.row('&', '\\\\', '\\end'))));
      const token = this.next();
      if (token === '\\\\') rows.push([]);
      if (token === '\\end') break;
    }
    if (this.text() !== name) throw new Error('another environment ends');
    const [left, right] = TABLES[base];
    const table = ml('mtable', isAligned ? { class: 'aligned', displaystyle: 'true' } : {}, ...rows.filter(row => row.length > 1 || row[0].firstChild.hasChildNodes()).map(row => ml('mtr', {}, ...row)));
    return fenced(left, [table], right);
  }
}

/** Returns nodes between fences. Their height in lines is for browsers without a font that stretches. */
function fenced(left, nodes, right) {
  const inside = ml('mrow', {}, ...nodes);
  const lines = inside.querySelectorAll(':scope > mtable > mtr').length || (inside.querySelector('mfrac, mtable') ? 2 : 1);
  const side = text => text ? [ml('mo', { fence: 'true', stretchy: 'true', style: `--lines: ${lines}` }, text)] : [];
  return ml('mrow', {}, ...side(left), inside, ...side(right));
}

/** Marks the page if no font of this browser stretches operators, so that styles do it. */
function findMathFont() {
  const fence = ml('mo', { stretchy: 'true' }, '('), at = ml('math', {}, fence, ml('mspace', { height: '4em', depth: '4em' }));
  document.body.append(at);
  document.documentElement.classList.toggle('unstretched', fence.getBoundingClientRect().height < 60);
  at.remove();
}

const unknown = (formula, name) => ml('mtext', { class: 'unknown' }, `\\${name}`);
const fraction = formula => ml('mfrac', {}, formula.argument(), formula.argument());
const words = formula => ml('mtext', {}, formula.text().replaceAll(' ', '\u00a0'));
const above = formula => { const top = formula.argument(); return ml('mover', {}, formula.argument(), top); };

const COMMANDS = {
  frac: fraction, dfrac: fraction, cfrac: fraction,
  tfrac: formula => ml('mstyle', { displaystyle: 'false' }, fraction(formula)),
  binom: formula => fenced('(', [ml('mfrac', { linethickness: '0' }, formula.argument(), formula.argument())], ')'),
  sqrt(formula) {
    if (formula.peek() !== '[') return ml('msqrt', {}, formula.argument());
    formula.next();
    const index = formula.group(']');
    formula.next();
    return ml('mroot', {}, formula.argument(), index);
  },
  left(formula) {
    const left = formula.fence(), nodes = [];
    for (;;) {
      nodes.push(...formula.row('\\right', '\\middle'));
      if (formula.next() === '\\right') break;
      nodes.push(ml('mo', { stretchy: 'true' }, formula.fence()));
    }
    return fenced(left, nodes, formula.fence());
  },
  begin: formula => formula.table(formula.text()),
  text: words, textrm: words, mbox: words, textit: words,
  textbf: formula => ml('mtext', { style: 'font-weight: bold' }, formula.text()),
  mathrm: formula => ml('mi', { mathvariant: 'normal' }, formula.text()), mathit: formula => formula.argument(),
  operatorname: formula => formula.named(formula.text(), false), 'operatorname*': formula => formula.named(formula.text(), true),
  overset: above, stackrel: above,
  underset: formula => { const under = formula.argument(); return ml('munder', {}, formula.argument(), under); },
  pmod: formula => fenced('(', [ml('mi', { mathvariant: 'normal' }, 'mod'), ml('mspace', { width: '.3em' }), formula.argument()], ')'),
  overline: formula => ml('mrow', { class: 'over' }, formula.argument()), underline: formula => ml('mrow', { class: 'under' }, formula.argument()),
  boxed: formula => ml('mrow', { class: 'boxed' }, formula.argument()),
  not: formula => ml('mo', {}, `${formula.argument().textContent}\u0338`),
};
for (const size of ['big', 'Big', 'bigg', 'Bigg']) for (const side of ['', 'l', 'r', 'm']) {
  COMMANDS[size + side] = formula => ml('mo', { stretchy: 'true', minsize: `${1.2 + .4 * ['big', 'Big', 'bigg', 'Bigg'].indexOf(size)}em` }, formula.fence());
}

/** Returns a formula as MathML, or its source. */
function math(source, isDisplay, whole = source) {
  try {
    if (source.length > 4000) throw new Error('too long');
    const formula = new Formula(source.trim(), isDisplay);
    const rows = [formula.row('\\\\', undefined)];
    while (formula.peek()) { formula.next(); rows.push(formula.row('\\\\', undefined)); }
    const cell = row => ml('mtr', {}, ml('mtd', {}, ...row));
    return ml('math', isDisplay ? { display: 'block' } : {}, rows.length > 1 ? ml('mtable', {}, ...rows.map(cell)) : ml('mrow', {}, ...rows[0]));
  } catch {
    return el('code', { class: 'source' }, whole);
  }
}
