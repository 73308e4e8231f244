"""Calls of the official Anthropic client: messages, whole and as streams."""

import anthropic

import lines


def call(asked):
    client = anthropic.Anthropic(
        base_url=asked["base_url"],
        api_key="unused",
        max_retries=asked.get("max_retries", 2),
        default_headers=asked["headers"],
        timeout=20,
    )
    more = {"max_tokens": 64, **asked.get("more", {})}
    with client:
        return KINDS[asked["kind"]](client, asked["model"], asked.get("text", "Say it once"), more)


def message(client, model, text, more):
    answer = client.messages.create(model=model, messages=[{"role": "user", "content": text}], **more)
    return answer.content[0].text, pair(answer.usage)


def message_stream(client, model, text, more):
    messages = [{"role": "user", "content": text}]
    with client.messages.stream(model=model, messages=messages, **more) as stream:
        said = "".join(stream.text_stream)
        return said, pair(stream.get_final_message().usage)


def pair(usage):
    return [usage.input_tokens, usage.output_tokens]


KINDS = {"message": message, "message_stream": message_stream}

if __name__ == "__main__":
    lines.serve(anthropic, call)
