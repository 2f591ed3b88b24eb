"""Agents that query an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam

from starpod.client import Observation, Session, Want
from starpod.trainer.agents.base import Agent, AgentError, AgentRefused, Agents, Move, Stop, Task
from starpod.trainer.data.episode import Episode, Finish
from starpod.trainer.prompts.prompt import PromptConfig, Prompter

KEY = "OPENAI_API_KEY"
RETRIES = 6
TIMEOUT_SECONDS = 300.0


class ChatAgents(Agents):
    """Agents that request one chat completion per turn, with the whole conversation so far.

    The key is read from OPENAI_API_KEY and is optional if `base_url` is given. Requests are retried with increasing
    delays if the endpoint is overloaded or fails.

    Args:
        model: Name of the model at the endpoint.
        base_url: URL of the endpoint; None is OpenAI's.
        temperature: Temperature of sampling; None is the endpoint's default.
        max_tokens: Maximum number of tokens in a reply.
        at_once: Maximum number of concurrent episodes, and thus of concurrent requests.
        thinking: Whether replies begin with reasoning between tags.
        retries: Maximum number of retries per request.

    Attributes:
        prompt_tokens, completion_tokens: Numbers of tokens used so far, as counted by the endpoint.
    """

    want = Want()

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        temperature: float | None = None,
        max_tokens: int = 400,
        at_once: int = 16,
        thinking: bool = True,
        retries: int = RETRIES,
    ) -> None:
        key = os.environ.get(KEY) or ("none" if base_url else "")
        if not key:
            raise AgentRefused(f"set {KEY} to your key, or name another endpoint with --base-url")
        self.model = model
        self.at_once = at_once
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.prompt = PromptConfig(thinking=thinking, prefill=False)
        self._answered = False
        self._base_url = base_url
        self._client = openai.AsyncOpenAI(api_key=key, base_url=base_url, max_retries=retries, timeout=TIMEOUT_SECONDS)
        # Newer OpenAI models reject max_tokens, whereas many other servers support only that name.
        self._settings: dict[str, Any] = {"max_tokens" if base_url else "max_completion_tokens": max_tokens}
        if temperature is not None:
            self._settings["temperature"] = temperature

    def agent(self, session: Session, task: Task, group: int) -> ChatAgent:
        return ChatAgent(self, session, task)

    def facts(self) -> dict[str, Any]:
        return {
            "temperature": self._settings.get("temperature"),
            "base_url": self._base_url,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }

    async def close(self) -> None:
        await self._client.close()

    async def complete(self, messages: list[ChatCompletionMessageParam]) -> Any:
        """Request the completion of a conversation. Raises AgentError and AgentRefused."""
        try:
            completion = await self._client.chat.completions.create(
                model=self.model, messages=messages, **self._settings
            )
        except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
            raise AgentRefused(f"{self._client.base_url} refuses {self.model}: {error.message}") from error
        except openai.APITimeoutError as error:
            raise AgentError(f"no reply within {TIMEOUT_SECONDS:.0f} s") from error
        except openai.APIConnectionError as error:
            reason = f"no answer from {self._client.base_url}: {error.__cause__ or error.message}"
            # If the model has answered before, only this episode fails, and others may succeed.
            raise (AgentError if self._answered else AgentRefused)(reason) from error
        except openai.APIError as error:
            raise AgentError(error.message) from error
        if not completion.choices:
            raise AgentError("the endpoint's reply holds no choice")
        self._answered = True
        if completion.usage is not None:
            self.prompt_tokens += completion.usage.prompt_tokens
            self.completion_tokens += completion.usage.completion_tokens
        return completion


class ChatAgent(Agent):
    """Agent that keeps one episode's messages. Their texts are the same as in training."""

    def __init__(self, agents: ChatAgents, session: Session, task: Task) -> None:
        self._agents = agents
        self._prompter = Prompter(agents.prompt, session.instructions, task.actions, session.limits)
        self._messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": self._prompter.system()}]

    def recall(self, episode: Episode) -> None:
        history = replace(episode, turns=[])
        for turn in episode.turns:
            self._messages.append({"role": "user", "content": self._prompter.following(history, turn.observation)})
            self._messages.append({"role": "assistant", "content": self._prompter.reply_of(turn)})
            history.turns.append(turn)

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        self._messages.append({"role": "user", "content": self._prompter.following(episode, observation.text)})
        choice = (await self._agents.complete(self._messages)).choices[0]
        text = choice.message.content or ""
        self._messages.append({"role": "assistant", "content": text})
        parsed_reply = self._prompter.parse(text)
        finish: Finish = "length" if choice.finish_reason == "length" else "stop"
        return Move(text, parsed_reply.actions, parsed_reply.thought, parsed_reply.well_formed, finish)
