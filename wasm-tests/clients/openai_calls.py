"""Calls of the official OpenAI client: chat completions, responses and embeddings, whole and as streams."""

import openai

import lines


def call(asked):
    client = openai.OpenAI(
        base_url=asked["base_url"] + "/v1",
        api_key="unused",
        max_retries=asked.get("max_retries", 2),
        default_headers=asked["headers"],
        timeout=20,
    )
    with client:
        return KINDS[asked["kind"]](client, asked["model"], asked.get("text", "Say it once"), asked.get("more", {}))


def chat(client, model, text, more):
    messages = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(model=model, messages=messages, **more)
    return answer.choices[0].message.content, pair(answer.usage)


def chat_stream(client, model, text, more):
    messages = [{"role": "user", "content": text}]
    said, usage = "", None
    with client.chat.completions.create(model=model, messages=messages, stream=True, **more) as stream:
        for chunk in stream:
            said += "".join(choice.delta.content or "" for choice in chunk.choices if choice.index == 0)
            usage = pair(chunk.usage) if chunk.usage else usage
    return said, usage


def response(client, model, text, more):
    answer = client.responses.create(model=model, input=text, **more)
    return answer.output_text, pair(answer.usage)


def response_stream(client, model, text, more):
    said, usage = "", None
    with client.responses.create(model=model, input=text, stream=True, **more) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                said += event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                usage = pair(event.response.usage)
    return said, usage


def embedding(client, model, text, more):
    answer = client.embeddings.create(model=model, input=text, **more)
    return str(list(answer.data[0].embedding)), [answer.usage.prompt_tokens, 0]


def pair(usage):
    """Input and output, whichever of its two names each has."""
    if hasattr(usage, "prompt_tokens"):
        return [usage.prompt_tokens, usage.completion_tokens]
    return [usage.input_tokens, usage.output_tokens]


KINDS = {
    "chat": chat,
    "chat_stream": chat_stream,
    "response": response,
    "response_stream": response_stream,
    "embedding": embedding,
}

if __name__ == "__main__":
    lines.serve(openai, call)
