"""Choose: the likeliest of a few options, scored in one batch over the shared text."""

from __future__ import annotations

from cotrt import LLM

QUIZ = (
    ("The capital of Italy is", [" Madrid", " Rome", " Vienna"]),
    ("The opposite of hot is", [" cold", " dry", " loud"]),
    ("A baby cat is called a", [" puppy", " foal", " kitten"]),
)


def main() -> None:
    with LLM("smollm2-135m") as llm:
        intro = llm.branch("Facts that everybody knows.\n")
        with intro.fork(len(QUIZ)) as branches:
            handles = [
                branch.choose(options, given=question)
                for branch, (question, options) in zip(branches, QUIZ, strict=True)
            ]
            for branch, handle, (question, options) in zip(branches, handles, QUIZ, strict=True):
                choice = handle.result()
                shown = ", ".join(
                    f"{option.strip()} {score.mean:.2f}"
                    for option, score in zip(options, choice.scores, strict=True)
                )
                print(f"{question}{choice.option}   ({shown})")
                # Question and option are part of the branch now, and can be built upon.
                branch.extend(".")
                assert branch.text.endswith(f"{question}{choice.option}.")


if __name__ == "__main__":
    main()
