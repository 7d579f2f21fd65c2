// Calls as JSON on standard input, made all at once with the SDK's default settings; on standard output what the user of
// each gets: "error" (the name of its class, null without one), "text", "code" and "status", or "turns".
import { text as read } from 'node:stream/consumers';
import OpenAI from 'openai';

const operations = {
  retrieve: (sdk, { fields }) => sdk.responses.retrieve(fields.id),
  list_containers: (sdk) => sdk.containers.list(),
  create: (sdk, { fields, stream }) => say(sdk, { input: 'hi', ...fields }, stream),
};

async function say(sdk, given, stream) {
  if (!stream) return sdk.responses.create({ model: 'gpt-4o', ...given });
  let last;
  for await (const event of await sdk.responses.create({ model: 'gpt-4o', ...given, stream: true })) last = event;
  return last.response;
}

const helper = (sdk, { fields }) => sdk.responses.stream({ model: 'gpt-4o', input: 'hi', ...fields }).finalResponse();

async function turns({ urls, key }) {
  const [one, other] = urls.map((baseURL) => new OpenAI({ baseURL, apiKey: key }));
  const chain = [await say(one, { input: '1' })];
  for (const [sdk, stream] of [[other, true], [one, false]]) {
    chain.push(await say(sdk, { input: 'x', previous_response_id: chain.at(-1).id }, stream));
  }
  const conversation = (await one.conversations.create()).id;
  const talk = [];
  for (const [sdk, stream] of [[other, false], [one, true], [other, false]]) {
    talk.push(await say(sdk, { input: 'x', conversation }, stream));
  }
  const said = (responses) => responses.map(({ output }) => output[0].content[0].text);
  return { chain: said(chain), conversation: said(talk) };
}

async function outcome(call) {
  try {
    if (call.operation === 'turns') return { turns: await turns(call) };
    const sdk = new OpenAI({ baseURL: call.url, apiKey: call.key, defaultHeaders: call.headers });
    await (call.client.endsWith('stream()') ? helper : operations[call.operation])(sdk, call);
    return { error: null, text: '', code: null, status: null };
  } catch (error) {
    return { error: error.constructor.name, text: error.message, code: error.code ?? null, status: error.status ?? null };
  }
}

const calls = JSON.parse(await read(process.stdin));
process.stdout.write(JSON.stringify(await Promise.all(calls.map(outcome))));
