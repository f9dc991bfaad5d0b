"""Keys of `data` that contradict each other."""

from __future__ import annotations

from streamrl.config.tree import Config, refuse


def check_data(config: Config) -> None:
    """Raise ConfigError for variables of a chat template that is not used, and for conversations that nobody trains on."""
    refuse(
        bool(config.data.messages_key) and config.run.kind != "sft",
        f"data.messages_key is for run.kind = sft, got it with run.kind = {config.run.kind}",
        hint="name the prompt's field in data.prompt_key, or train on the conversations themselves with run.kind = sft",
        key="data.messages_key",
    )
    refuse(
        bool(config.data.messages_key) and not config.data.chat_template,
        "data.messages_key needs the chat template, got data.chat_template = false",
        hint="leave data.chat_template out",
        key="data.chat_template",
    )
    for key in ("chat_template_kwargs", "chat_template_kwargs_key"):
        refuse(
            bool(getattr(config.data, key)) and not config.data.chat_template,
            f"data.{key} is for chat templates, got it with data.chat_template = false",
            hint="leave it out, or use the chat template",
            key=f"data.{key}",
        )
