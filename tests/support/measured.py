"""Print what tests on GPUs measure."""


def say(text: str) -> None:
    print(f"\n[measured] {text}", flush=True)
