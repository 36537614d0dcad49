//! Answers to turns: parsed parts, tools, and several answers to one prompt.

use kvant::{
    Answers, CancelFlag, Error, FinishReason, GenerateOptions, Message, Model, OpenOptions, ParsedAnswer,
    Part, SamplerParams, Session, ToolChoice, ToolSet, TurnOptions,
};
use serde_json::{Value, json};

fn model() -> Model {
    Model::bundled(OpenOptions { n_threads: Some(1), ..Default::default() }).unwrap()
}

fn options(seed: u64) -> GenerateOptions {
    let sampler = SamplerParams { temperature: 1.5, seed, ..Default::default() };
    GenerateOptions { sampler, max_tokens: Some(24), ..Default::default() }
}

fn several(session: &mut Session, n: usize, options: GenerateOptions) -> Result<Answers, Error> {
    let turn = session.model().chat_turn(&[Message::user("Tell me a story.")], TurnOptions::default())?;
    session.answers(&turn, n, options, &CancelFlag::default(), &mut |_| ())
}

fn tool(parameters: &Value) -> Value {
    json!({ "type": "function", "function": { "name": "weather", "parameters": parameters } })
}

fn with_tool(parameters: &Value) -> TurnOptions {
    let tools = ToolSet::new(vec![tool(parameters)], &ToolChoice::Auto).unwrap();
    TurnOptions { tools, ..Default::default() }
}

#[test]
fn answers_to_one_prompt_equal_those_generated_alone() {
    let model = model();
    let mut session = model.session(Default::default()).unwrap();
    let mut parsed = vec![ParsedAnswer::default(); 3];
    let mut answers = several(&mut session, 3, options(7)).unwrap();
    for part in answers.by_ref() {
        let (index, part) = part.unwrap();
        parsed[index].extend([part]);
    }
    let turn = model.chat_turn(&[Message::user("Tell me a story.")], TurnOptions::default()).unwrap();
    assert_eq!(session.tokens(), turn.tokens);
    for (index, parsed) in parsed.iter().enumerate() {
        let mut alone = model.session(Default::default()).unwrap();
        let mut answer = alone.answer(&turn, options(7 + index as u64)).unwrap();
        assert_eq!(&answer.by_ref().collect::<Result<ParsedAnswer, Error>>().unwrap(), parsed);
        let stats = answers.stats(index).unwrap();
        assert_eq!((stats.finish, stats.n_gen), (answer.stats().finish, answer.stats().n_gen));
    }
    assert_ne!(parsed[0], parsed[1]);
    for n in [0, Answers::MAX + 1] {
        assert!(
            several(&mut session, n, options(7)).is_err_and(|error| error.to_string().starts_with("n: "))
        );
    }
}

#[test]
fn a_cancelled_answer_ends() {
    let model = model();
    let mut session = model.session(Default::default()).unwrap();
    let turn = model.chat_turn(&[Message::user("Tell me a story.")], TurnOptions::default()).unwrap();
    let cancel = CancelFlag::default();
    let mut state = session.begin_answer(&turn, options(1), &cancel, &mut |_| ()).unwrap();
    while !matches!(state.next(&mut session), Some(Ok(Part::Text(_)))) {}
    cancel.cancel();
    assert!(state.next(&mut session).is_none_or(|part| part.is_ok()));
    assert!(state.next(&mut session).is_none());
    assert_eq!(state.stats().finish, Some(FinishReason::Cancelled));
}

#[test]
fn a_partly_supported_tool_schema_is_a_warning_or_an_error() {
    let model = model();
    let unsupported =
        json!({ "type": "object", "properties": { "city": { "type": "string", "pattern": "(?=a)" } } });
    let mut session = model.session(Default::default()).unwrap();
    let turn = model.chat_turn(&[Message::user("Hello")], with_tool(&unsupported)).unwrap();
    let answer = session.answer(&turn, options(1)).unwrap();
    assert!(answer.warnings()[0].contains("'weather'"), "{:?}", answer.warnings());
    let tools = ToolSet::new(vec![tool(&unsupported)], &ToolChoice::Required).unwrap();
    let required = TurnOptions { tools, ..Default::default() };
    let turn = model.chat_turn(&[Message::user("Hello")], required).unwrap();
    let error = session.answer(&turn, options(1)).err().unwrap().to_string();
    assert!(error.contains("the arguments of the tool 'weather' cannot be constrained"), "{error}");
}
