"""The Python clients with their default settings: single calls, and turns that alternate between two replicas."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import openai

from acceptance.clients.refusals import MODEL, Call

__all__ = ["CLIENTS", "Client"]

_NATIVE = ("input", "previous_response_id", "conversation", "tools")

Turns = dict[str, list[str]]
"""What was said in each kind of chain, turn by turn."""

Said = tuple[str, Any]
"""The text of an answer, and what its client wants for the turn after it."""


class Client(ABC):
    def __init__(self) -> None:
        self._shared = openai.AsyncOpenAI(api_key="-", base_url="http://-")

    @abstractmethod
    async def ask(self, call: Call) -> None:
        """Make one call; raises what the user of the client gets."""

    async def say(
        self, url: str, key: str, *, stream: bool, after: Any = None, conversation: str | None = None
    ) -> Said:
        """Have a turn, in a conversation or ``after`` another one."""
        raise NotImplementedError

    async def tools(self, urls: Sequence[str], key: str) -> Turns:
        """What is said after a tool has run, where the client runs tools."""
        return {}

    async def turns(self, urls: Sequence[str], key: str) -> Turns:
        one, other = urls
        chain, last = [], None
        for url, stream in ((one, False), (other, True), (one, False)):
            text, last = await self.say(url, key, stream=stream, after=last)
            chain.append(text)
        conversation = (await self._on(one, key).conversations.create()).id
        talk = [
            (await self.say(url, key, stream=stream, conversation=conversation))[0]
            for url, stream in ((other, False), (one, True), (other, False))
        ]
        return {"chain": chain, "conversation": talk, **await self.tools(urls, key)}

    async def close(self) -> None:
        await self._shared.close()

    def _on(self, url: str, key: str, headers: dict[str, str] | None = None) -> openai.AsyncOpenAI:
        return self._shared.with_options(base_url=url, api_key=key, default_headers=headers or {})

    def _for(self, call: Call) -> openai.AsyncOpenAI:
        return self._on(call["url"], call["key"], call["headers"])


class OpenAI(Client):
    """openai-python, streams read event by event."""

    async def ask(self, call: Call) -> None:
        sdk = self._for(call)
        match call["operation"]:
            case "retrieve":
                await sdk.responses.retrieve(call["fields"]["id"])
            case "list_containers":
                await sdk.containers.list()
            case _:
                await _create(sdk, stream=call["stream"], **_given(call))

    async def say(
        self, url: str, key: str, *, stream: bool, after: Any = None, conversation: str | None = None
    ) -> Said:
        answer = await _create(
            self._on(url, key), stream=stream, input="x", previous_response_id=after, conversation=conversation
        )
        return answer.output_text, answer.id


class OpenAIHelper(Client):
    """openai-python, streams read by ``responses.stream()``."""

    async def ask(self, call: Call) -> None:
        async with self._for(call).responses.stream(model=MODEL, **_given(call)) as events:
            await events.get_final_response()


class Agents(Client):
    def __init__(self) -> None:
        super().__init__()
        import agents

        self._agents = agents
        self._config = agents.RunConfig(tracing_disabled=True)  # traces would go to OpenAI

    def _agent(self, sdk: openai.AsyncOpenAI, tools: list[Any] | None = None, **settings: Any) -> Any:
        model = self._agents.OpenAIResponsesModel(MODEL, sdk)
        return self._agents.Agent(
            "a", model=model, tools=tools or [], model_settings=self._agents.ModelSettings(**settings)
        )

    async def _run(self, agent: Any, said: str, *, stream: bool = False, **chosen: Any) -> Any:
        if not stream:
            return await self._agents.Runner.run(agent, said, run_config=self._config, **chosen)
        result = self._agents.Runner.run_streamed(agent, said, run_config=self._config, **chosen)
        async for _ in result.stream_events():
            pass
        return result

    async def ask(self, call: Call) -> None:
        fields = dict(call["fields"])
        # Both at once are refused by the SDK itself, so they go round it.
        chosen = {} if "conversation" in fields else {"previous_response_id": fields.pop("previous_response_id", None)}
        await self._run(self._agent(self._for(call), extra_body=fields), "hi", stream=call["stream"], **chosen)

    async def say(
        self, url: str, key: str, *, stream: bool, after: Any = None, conversation: str | None = None
    ) -> Said:
        agent = self._agent(self._on(url, key))
        result = await self._run(agent, "x", stream=stream, previous_response_id=after, conversation_id=conversation)
        return result.final_output, result.last_response_id

    async def tools(self, urls: Sequence[str], key: str) -> Turns:
        return {
            "tools": [await self._tools(urls, key, stream=False)],
            "tools, streamed": [await self._tools(urls, key, stream=True)],
        }

    async def _tools(self, urls: Sequence[str], key: str, *, stream: bool) -> str:
        """A run that calls a function, each of its requests on another replica."""

        @self._agents.function_tool
        def weather() -> str:
            """The weather."""
            return "fine"

        async with alternating(urls, key) as sdk:
            agent = self._agent(sdk, [weather], tool_choice="required")
            result = await self._run(agent, "weather?", stream=stream, auto_previous_response_id=True)
        return str(result.final_output)


class LangChain(Client):
    def __init__(self) -> None:
        super().__init__()
        import langchain_openai

        # As it would make them, but once: each takes a TLS context, and every call here has a model of its own.
        self._clients = {
            "http_client": openai.DefaultHttpxClient(),
            "http_async_client": openai.DefaultAsyncHttpxClient(),
        }
        self._model = partial(langchain_openai.ChatOpenAI, model=MODEL, use_responses_api=True, **self._clients)

    async def ask(self, call: Call) -> None:
        fields = dict(call["fields"])
        chosen = {k: fields.pop(k) for k in ("previous_response_id",) if k in fields}
        model = self._model(
            base_url=call["url"], api_key=call["key"], default_headers=call["headers"], extra_body=fields
        )
        if not call["stream"]:
            await model.ainvoke("hi", **chosen)
            return
        async for _ in model.astream("hi", **chosen):
            pass

    async def say(
        self, url: str, key: str, *, stream: bool, after: Any = None, conversation: str | None = None
    ) -> Said:
        model = self._model(base_url=url, api_key=key, use_previous_response_id=True)
        history = [*(after or []), ("human", "x")]
        chosen = {} if conversation is None else {"conversation": conversation}
        answer = await self._answer(model, history, stream=stream, **chosen)
        return answer.text, [*history, answer]

    async def tools(self, urls: Sequence[str], key: str) -> Turns:
        models = [self._model(base_url=url, api_key=key, use_previous_response_id=True) for url in urls]
        return {
            "tools": [await self._tools(*models, stream=False)],
            "tools, streamed": [await self._tools(*models, stream=True)],
        }

    async def close(self) -> None:
        await super().close()
        self._clients["http_client"].close()
        await self._clients["http_async_client"].aclose()

    async def _tools(self, one: Any, other: Any, *, stream: bool) -> str:
        from langchain_core.messages import ToolMessage

        def weather() -> str:
            """The weather."""
            return "fine"

        calling = await self._answer(one.bind_tools([weather], tool_choice="required"), "weather?", stream=stream)
        result = ToolMessage("fine", tool_call_id=calling.tool_calls[0]["id"])
        return str((await self._answer(other, [("human", "weather?"), calling, result], stream=stream)).text)

    @staticmethod
    async def _answer(model: Any, said: Any, *, stream: bool, **chosen: Any) -> Any:
        if not stream:
            return await model.ainvoke(said, **chosen)
        whole = None
        async for piece in model.astream(said, **chosen):
            whole = piece if whole is None else whole + piece
        return whole


class LiteLLM(Client):
    def __init__(self) -> None:
        super().__init__()
        import litellm

        litellm.suppress_debug_info = True  # prints for every error
        self._litellm = litellm

    async def ask(self, call: Call) -> None:
        place = {"api_base": call["url"], "api_key": call["key"], "extra_headers": call["headers"]}
        fields = {"input": "hi", **call["fields"]}
        if call["operation"] == "retrieve":
            await self._litellm.aget_responses(fields["id"], custom_llm_provider="openai", **place)
            return
        given = {k: fields.pop(k) for k in ("input", "previous_response_id", "tools") if k in fields}
        await self._answer(place, stream=call["stream"], extra_body=fields, **given)

    async def _answer(self, place: dict[str, Any], *, stream: bool, **given: Any) -> Any:
        answer = await self._litellm.aresponses(model=f"openai/{MODEL}", stream=stream, **place, **given)
        return _last([event async for event in answer]) if stream else answer

    async def say(
        self, url: str, key: str, *, stream: bool, after: Any = None, conversation: str | None = None
    ) -> Said:
        body = None if conversation is None else {"conversation": conversation}
        answer = await self._answer(
            {"api_base": url, "api_key": key}, stream=stream, input="x", previous_response_id=after, extra_body=body
        )
        return answer.output_text, answer.id

    async def close(self) -> None:
        await super().close()
        await self._litellm.close_litellm_async_clients()


class LiteLLMRouter(LiteLLM):
    """LiteLLM's Router over two deployments of a model, as its proxy has it: it asks again by itself."""

    async def _answer(self, place: dict[str, Any], *, stream: bool, **given: Any) -> Any:
        deployment = {"model": f"openai/{MODEL}", **place}
        router = self._litellm.Router([{"model_name": MODEL, "litellm_params": dict(deployment)} for _ in range(2)])
        answer = await router.aresponses(model=MODEL, stream=stream, **given)
        return _last([event async for event in answer]) if stream else answer


CLIENTS: dict[str, type[Client]] = {
    "openai-python": OpenAI,
    "openai-python, stream()": OpenAIHelper,
    "openai-agents": Agents,
    "langchain-openai": LangChain,
    "LiteLLM": LiteLLM,
    "LiteLLM, Router": LiteLLMRouter,
}


def alternating(urls: Sequence[str], key: str) -> openai.AsyncOpenAI:
    """A client behind a load balancer: each request goes to the next of ``urls``."""
    ports = itertools.cycle([urlsplit(url).port for url in urls])

    async def next_one(request: Any) -> None:
        request.url = request.url.copy_with(port=next(ports))

    through = openai.DefaultAsyncHttpxClient(event_hooks={"request": [next_one]})
    return openai.AsyncOpenAI(base_url=urls[0], api_key=key, http_client=through)


async def _create(sdk: openai.AsyncOpenAI, *, stream: bool, **given: Any) -> Any:
    answer = await sdk.responses.create(model=MODEL, stream=stream, **given)
    return _last([event async for event in answer]) if stream else answer


def _given(call: Call) -> dict[str, Any]:
    fields = {"input": "hi", **call["fields"]}
    return {**{name: fields.pop(name) for name in _NATIVE if name in fields}, "extra_body": fields}


def _last(events: list[Any]) -> Any:
    """The response at the end of a stream."""
    return events[-1].response
