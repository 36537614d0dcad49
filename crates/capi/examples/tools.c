// Has a model call a tool, and answers with the tool's result.
//
//   cargo build --release -p kvant-capi
//   cc -I crates/capi/include crates/capi/examples/tools.c -L target/release -lkvant_capi -Wl,-rpath,target/release -o tools
//   ./tools [MODEL.gguf]

#include "kvant.h"

#include <stdio.h>
#include <stdlib.h>

static const char QUESTION[] = "{\"role\": \"user\", \"content\": \"How is the weather in Oslo?\"}";
static const char TOOLS[] =
    "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"description\": \"The weather in a city\", "
    "\"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"enum\": [\"Oslo\", \"Rome\"]}}, "
    "\"required\": [\"city\"], \"additionalProperties\": false}}}]";
// Calls have the ids call_0, call_1, ...
static const char RESULT[] = "{\"role\": \"tool\", \"tool_call_id\": \"call_0\", \"content\": \"Rain, 4 degrees.\"}";

static char *error = NULL;

// Exits if a call failed.
static void must(kvant_status status) {
    if (status == KVANT_STATUS_OK) {
        return;
    }
    fprintf(stderr, "tools: %s\n", error);
    kvant_string_free(error);
    exit(1);
}

int main(int argc, char **argv) {
    kvant_model *model = NULL;
    if (argc > 1) {
        must(kvant_model_open(argv[1], NULL, &model, &error));
    } else {
        must(kvant_model_bundled(NULL, &model, &error));
    }
    kvant_session *session = NULL;
    must(kvant_session_new(model, NULL, &session, &error));

    char messages[4096];
    snprintf(messages, sizeof messages, "[%s]", QUESTION);
    kvant_chat chat = {.messages = messages, .tools = TOOLS, .tool_choice = "required"};
    kvant_generate_options options = kvant_generate_options_default();
    options.temperature = 0;
    char *call = NULL;
    must(kvant_session_chat(session, &chat, &options, NULL, NULL, &call, NULL, &error));
    printf("%s\n", call);

    if (snprintf(messages, sizeof messages, "[%s, %s, %s]", QUESTION, call, RESULT) >= (int)sizeof messages) {
        fprintf(stderr, "tools: the conversation is too long\n");
        return 1;
    }
    kvant_string_free(call);
    chat.tool_choice = "none";
    options.max_tokens = 64;
    char *answer = NULL;
    must(kvant_session_chat(session, &chat, &options, NULL, NULL, &answer, NULL, &error));
    printf("%s\n", answer);
    kvant_string_free(answer);
    kvant_session_free(session);
    kvant_model_free(model);
    return 0;
}
