"""A chat as a growing list of messages: every turn computes its own new tokens only."""

from __future__ import annotations

from cotrt import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two is further north?",
)


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with LLM("smollm2-135m") as llm:
        messages: list[dict[str, str]] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            [answer] = llm.chat(messages, params, use_tqdm=False)
            text = answer.outputs[0].text
            messages.append({"role": "assistant", "content": text})

            num_tokens = len(answer.prompt_token_ids)
            print(f"> {question}\n{text}")
            print(f"  ({answer.num_cached_tokens} of {num_tokens} prompt tokens reused)\n")


if __name__ == "__main__":
    main()
