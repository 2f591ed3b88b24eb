"""Agents that query an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import openai

from starpod.client import Observation, Session, Want
from starpod.client.transport import Backoff
from starpod.trainer.agents.base import Agent, AgentError, AgentRefused, Agents, Move, Stop, Task
from starpod.trainer.data.episode import Episode, Finish
from starpod.trainer.prompts.prompt import PromptConfig, Prompter
from starpod.v1.untrusted import Completion, read_completion

KEY = "OPENAI_API_KEY"
RETRIES = 6
REPLIES = 3
"""Maximum number of replies that are requested for one turn because the ones before are malformed."""
FIRST_WAIT = 0.5
"""First wait in seconds before a malformed reply is requested again."""
TIMEOUT_SECONDS = 300.0


class ChatAgents(Agents):
    """Agents that request one chat completion per turn, with the whole conversation so far.

    The key is read from OPENAI_API_KEY and is optional if `base_url` is given. Requests are retried with increasing
    delays if the endpoint is overloaded or fails.

    Args:
        base_url: URL of the endpoint; None is OpenAI's.
        temperature: Temperature of sampling; None is the endpoint's default.
        max_tokens: Maximum number of tokens in a reply.
        at_once: Maximum number of concurrent episodes, and thus of concurrent requests.
        thinking: Whether replies begin with reasoning between tags.
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
            raise AgentRefused(
                f"set {KEY} to your key, or write the address of another endpoint, as in http://127.0.0.1:8000/v1#NAME"
            )
        self.model = model
        self.at_once = at_once
        self.prompt = PromptConfig(thinking=thinking, prefill=False)
        # Once the model has answered, only an episode fails, and others may succeed.
        self._failure: type[AgentError | AgentRefused] = AgentRefused
        self._client = openai.AsyncOpenAI(api_key=key, base_url=base_url, max_retries=retries, timeout=TIMEOUT_SECONDS)
        # Newer OpenAI models reject max_tokens, whereas many other servers support only that name.
        self._settings: dict[str, Any] = {"max_tokens" if base_url else "max_completion_tokens": max_tokens}
        if temperature is not None:
            self._settings["temperature"] = temperature

    def agent(self, session: Session, task: Task, group: int) -> ChatAgent:
        return ChatAgent(self, session, task)

    async def close(self) -> None:
        await self._client.close()

    async def complete(self, messages: list[dict[str, str]], usage: dict[str, int] | None = None) -> tuple[str, Finish]:
        """Request the completion of a conversation, and return its text and finish. Raises AgentError, AgentRefused.

        A malformed reply is requested again. usage: `Episode.usage`, to which the reply's numbers of tokens are added.
        """
        url, body = self._client.base_url, {"model": self.model, "messages": messages, **self._settings}
        backoff = Backoff(FIRST_WAIT)
        for number in range(1, REPLIES + 1):
            try:
                # As text: the client's own types are not checked.
                completion = read_completion(await self._client.post("/chat/completions", body=body, cast_to=str))
                finish, counts = _finish_of(completion), _count_tokens(completion.usage)
            except (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError) as error:
                raise AgentRefused(f"{url} refuses {self.model}: {error.message}") from error
            except openai.APITimeoutError as error:
                raise AgentError(f"{url} sent no reply within {TIMEOUT_SECONDS:.0f} s") from error
            except openai.APIConnectionError as error:
                raise self._failure(f"no answer from {url}: {error.__cause__ or error.message}") from error
            except openai.APIError as error:
                raise AgentError(f"{url}: {error.message}") from error
            except ValueError as error:
                if number == REPLIES:
                    raise self._failure(f"{url} answered {REPLIES} times, but {error}") from error
            else:
                break
            await asyncio.sleep(backoff.wait())
        self._failure = AgentError
        if usage is not None:
            usage |= {name: usage.get(name, 0) + count for name, count in counts.items()}
        return completion.text, finish


def _finish_of(completion: Completion) -> Finish:
    """Return why a reply ended. Raises ValueError if the endpoint hides the reply."""
    if completion.finish == "content_filter":
        raise ValueError("the reply has the finish reason 'content_filter'")
    return "length" if completion.finish == "length" else "stop"


def _count_tokens(usage: Any) -> dict[str, int]:
    """Return the tokens of prompt and reply that an endpoint reports. Raises ValueError if they are no counts."""
    names = ("prompt_tokens", "completion_tokens")
    counts = {name: (usage or {}).get(name, 0) for name in names} if isinstance(usage, dict | None) else {"": usage}
    if not all(type(count) is int and count >= 0 for count in counts.values()):
        raise ValueError(f"the reply has the usage {usage!r:.80}")
    return counts


class ChatAgent(Agent):
    """Agent that keeps one episode's messages. Their texts are the same as in training."""

    def __init__(self, agents: ChatAgents, session: Session, task: Task) -> None:
        self._agents = agents
        self._prompter = Prompter(agents.prompt, session.instructions, task.actions, session.limits)
        self._messages: list[dict[str, str]] = [{"role": "system", "content": self._prompter.system()}]

    def recall(self, episode: Episode) -> None:
        history = replace(episode, turns=[])
        for turn in episode.turns:
            self._messages.append({"role": "user", "content": self._prompter.following(history, turn.observation)})
            self._messages.append({"role": "assistant", "content": self._prompter.reply_of(turn)})
            history.turns.append(turn)

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        self._messages.append({"role": "user", "content": self._prompter.following(episode, observation.text)})
        text, finish = await self._agents.complete(self._messages, episode.usage)
        self._messages.append({"role": "assistant", "content": text})
        parsed_reply = self._prompter.parse(text)
        return Move(text, parsed_reply.actions, parsed_reply.thought, parsed_reply.well_formed, finish)
