// OpenAI's client for JavaScript. HEADRACE_URL, HEADRACE_KEY and HEADRACE_MODEL name the server.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { HEADRACE_URL: baseURL, HEADRACE_KEY: apiKey, HEADRACE_MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ask = { model, messages, temperature: 0, max_tokens: 64 };
const Color = z.object({ color: z.enum(["teal"]) });
const tool = zodFunction({ name: "pick_color", parameters: Color });

test("a chat, whole and streamed", async () => {
  const whole = await client.chat.completions.create(ask);
  assert.match(whole.choices[0].message.content, /Paris/);
  assert.ok(whole._request_id);
  const stream = await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } });
  let text = "";
  let usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.total_tokens, whole.usage.total_tokens);
});

test("the stream helper", async () => {
  const pieces = [];
  const stream = client.chat.completions.stream(ask).on("content", (delta) => pieces.push(delta));
  const final = await stream.finalChatCompletion();
  assert.ok(pieces.length > 3);
  assert.equal(pieces.join(""), final.choices[0].message.content);
  assert.equal(final.choices[0].finish_reason, "stop");
});

test("a stream that is left ends", async () => {
  const stream = await client.chat.completions.create({ ...ask, max_tokens: 2000, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("structured output", async () => {
  const answer = await client.chat.completions.parse({ ...ask, response_format: zodResponseFormat(Color, "color") });
  assert.deepEqual(answer.choices[0].message.parsed, { color: "teal" });
});

test("a call, streamed", async () => {
  const stream = client.chat.completions.stream({ ...ask, tools: [tool], tool_choice: "required" });
  const [choice] = (await stream.finalChatCompletion()).choices;
  assert.equal(choice.finish_reason, "tool_calls");
  assert.equal(choice.message.tool_calls[0].function.name, "pick_color");
  assert.deepEqual(choice.message.tool_calls[0].function.parsed_arguments, { color: "teal" });
});

test("a tool that is run", async () => {
  const called = [];
  const run = (args) => called.push(args) && "done";
  const runner = client.chat.completions.runTools({
    ...ask,
    tools: [zodFunction({ name: "pick_color", parameters: Color, function: run })],
    tool_choice: { type: "function", function: { name: "pick_color" } },
  });
  await runner.done();
  assert.deepEqual(called, [{ color: "teal" }]);
  assert.equal(runner.messages.at(-1).role, "tool");
});

test("text completions, embeddings, models", async () => {
  const text = { model, prompt: "The capital of France is", temperature: 0, max_tokens: 4 };
  assert.match((await client.completions.create(text)).choices[0].text, /^ Paris/);
  const { data } = await client.embeddings.create({ model, input: ["A cat.", "Tax law"] });
  assert.deepEqual(data.map((entry) => entry.embedding.length), [576, 576]);
  const ids = [];
  for await (const entry of client.models.list()) ids.push(entry.id);
  assert.deepEqual(ids, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

for (const stream of [false, true]) {
  test(`errors, stream ${stream}`, async () => {
    const refused = (fields, kind, expected) =>
      assert.rejects(client.chat.completions.create({ ...ask, stream, ...fields }), (error) => {
        assert.ok(error instanceof kind, String(error));
        assert.ok(error.requestID);
        assert.deepEqual([error.status, error.code, error.param], expected);
        return true;
      });
    await refused({ model: "no-such" }, OpenAI.NotFoundError, [404, "model_not_found", "model"]);
    await refused({ temperature: 9 }, OpenAI.BadRequestError, [400, "invalid_value", "temperature"]);
    await assert.rejects(
      client.withOptions({ apiKey: "sk-wrong" }).chat.completions.create({ ...ask, stream }),
      OpenAI.AuthenticationError,
    );
  });
}
