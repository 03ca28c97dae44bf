// The AI SDK with its provider for compatible servers. HEADRACE_URL, HEADRACE_KEY and HEADRACE_MODEL name the server.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const { HEADRACE_URL: baseURL, HEADRACE_KEY: apiKey, HEADRACE_MODEL: name } = process.env;
const headrace = (key = apiKey) =>
  createOpenAICompatible({ name: "headrace", baseURL, apiKey: key, includeUsage: true, supportsStructuredOutputs: true });
const provider = headrace();
const ask = {
  model: provider(name),
  prompt: "What is the capital of France?",
  temperature: 0,
  maxOutputTokens: 64,
  maxRetries: 0,
};
const Color = z.object({ color: z.enum(["teal"]) });

/** What comes out of an async iterable, as an array. */
const collect = async (iterable) => {
  const items = [];
  for await (const item of iterable) items.push(item);
  return items;
};

test("text, whole and streamed", async () => {
  const whole = await generateText(ask);
  assert.match(whole.text, /Paris/);
  assert.equal(whole.finishReason, "stop");
  const stream = streamText(ask);
  const pieces = await collect(stream.textStream);
  assert.ok(pieces.length > 3);
  assert.equal(pieces.join(""), whole.text);
  assert.equal((await stream.usage).totalTokens, whole.usage.totalTokens);
  assert.ok(whole.usage.totalTokens > 0);
});

test("structured output, whole and streamed", async () => {
  const output = Output.object({ schema: Color });
  const whole = await generateText({ ...ask, output });
  assert.deepEqual(whole.output, { color: "teal" });
  const stream = streamText({ ...ask, output });
  assert.deepEqual((await collect(stream.partialOutputStream)).at(-1), { color: "teal" });
  assert.deepEqual(await stream.output, { color: "teal" });
});

test("a tool is run and its result read", async () => {
  const tools = { pick_color: tool({ inputSchema: Color, execute: async ({ color }) => `${color} it is` }) };
  const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
  const whole = await generateText({ ...ask, tools, prepareStep, stopWhen: isStepCount(2) });
  assert.deepEqual(whole.steps.map((step) => step.toolResults.map((result) => result.output)), [["teal it is"], []]);
  assert.ok(whole.text);
  const stream = streamText({ ...ask, tools, toolChoice: { type: "tool", toolName: "pick_color" } });
  const types = (await collect(stream.fullStream)).map((part) => part.type);
  assert.ok(types.indexOf("tool-input-delta") < types.indexOf("tool-call"));
  assert.deepEqual((await stream.toolCalls).map((call) => call.input), [{ color: "teal" }]);
});

test("embeddings", async () => {
  const { embeddings, usage } = await embedMany({ model: provider.embeddingModel(name), values: ["A cat.", "Tax law"] });
  assert.deepEqual(embeddings.map((vector) => vector.length), [576, 576]);
  assert.ok(usage.tokens > 0);
});

test("errors", async () => {
  const refused = (fields, status, param) =>
    assert.rejects(generateText({ ...ask, ...fields }), (error) => {
      assert.ok(APICallError.isInstance(error), String(error));
      assert.deepEqual([error.statusCode, error.isRetryable], [status, false]);
      assert.equal(error.data.error.param, param);
      assert.equal(error.message, error.data.error.message);
      return true;
    });
  await refused({ model: provider("no-such") }, 404, "model");
  await refused({ temperature: 9 }, 400, "temperature");
  await refused({ model: headrace("sk-wrong")(name) }, 401, null);
  const stream = streamText({ ...ask, temperature: 9, onError: () => {} });
  const errors = (await collect(stream.fullStream)).filter((part) => part.type === "error");
  assert.deepEqual(errors.map((part) => part.error.statusCode), [400]);
});
