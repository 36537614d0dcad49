//! Formats that are known by name, for files that carry none or a bad one.

/// Names and templates of the formats that are built in.
pub const BUILTIN: [(&str, &str); 5] =
    [("chatml", CHATML), ("llama3", LLAMA3), ("gemma", GEMMA), ("mistral", MISTRAL), ("phi3", PHI3)];

/// The template of the format `name`.
pub fn builtin(name: &str) -> Option<&'static str> {
    BUILTIN.into_iter().find_map(|(known, source)| (known == name).then_some(source))
}

/// Qwen, Hermes, SmolLM and many others.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' \
                      + message.content + '<|im_end|>\n' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const LLAMA3: &str = "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message.role \
                      + '<|end_header_id|>\n\n' + message.content|trim + '<|eot_id|>' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}\
                      {% endif %}";

/// Gemma has no turn for instructions: they stand at the head of the first message.
const GEMMA: &str = "{{ bos_token }}{% set ns = namespace(first='') %}{% for message in messages %}\
                     {% if message.role == 'system' %}{% set ns.first = message.content|trim + '\n\n' %}{% else %}\
                     {{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' \
                     + ns.first + message.content|trim + '<end_of_turn>\n' }}{% set ns.first = '' %}\
                     {% endif %}{% endfor %}\
                     {% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}";

/// Instructions stand at the head of the first message here too.
const MISTRAL: &str = "{{ bos_token }}{% set ns = namespace(first='') %}{% for message in messages %}\
                       {% if message.role == 'system' %}{% set ns.first = message.content + '\n\n' %}\
                       {% elif message.role == 'assistant' %}{{ message.content + eos_token }}{% else %}\
                       {{ '[INST] ' + ns.first + message.content + ' [/INST]' }}{% set ns.first = '' %}\
                       {% endif %}{% endfor %}";

const PHI3: &str = "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}\
                    {% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}";
