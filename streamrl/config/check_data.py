"""Keys of `data` that contradict each other."""

from __future__ import annotations

from streamrl.config.tree import Config, refuse


def check_data(config: Config) -> None:
    """Raise ConfigError for variables of a chat template that is not used."""
    for key in ("chat_template_kwargs", "chat_template_kwargs_key"):
        refuse(
            bool(getattr(config.data, key)) and not config.data.chat_template,
            f"data.{key} is for chat templates, got it with data.chat_template = false",
            hint="leave it out, or use the chat template",
            key=f"data.{key}",
        )
