// Programs of the Vercel AI SDK.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import {
  ASK_NAME, ASK_WEATHER, check, checkWeather, FACTS, getWeather, HELLO, main, model, NAME, NO_KEY, program, url,
} from "./trial.mjs";

const openai = createOpenAI({ baseURL: url, apiKey: NO_KEY });
const compatible = createOpenAICompatible({
  name: "served", baseURL: url, apiKey: NO_KEY, supportsStructuredOutputs: true,
});
const schema = z.object({ name: z.string(), population: z.number().int() });
const tools = {
  get_weather: tool({
    description: "Return the weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async (input) => getWeather(input),
  }),
};
const fixed = { maxRetries: 0, stopWhen: stepCountIs(4) };

program("first", "generateText, openai", async () => {
  const { text } = await generateText({ ...fixed, model: openai(model), prompt: HELLO });
  check(text, "no text");
});
program("first", "generateText, openai-compatible", async () => {
  const { text } = await generateText({ ...fixed, model: compatible(model), prompt: HELLO });
  check(text, "no text");
});
program("turns", "messages", async () => {
  const messages = [{ role: "user", content: NAME }];
  const first = await generateText({ ...fixed, model: openai(model), messages });
  messages.push(...first.response.messages, { role: "user", content: ASK_NAME });
  const { text } = await generateText({ ...fixed, model: openai(model), messages });
  check(text.includes("Ada"), text);
});
program("stream", "streamText", async () => {
  const result = streamText({ ...fixed, model: openai(model), prompt: HELLO, onError() {} });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  check(text, "no text");
});
program("tool", "generateText, openai", async () => {
  const { text } = await generateText({ ...fixed, model: openai(model), prompt: ASK_WEATHER, tools });
  checkWeather(text);
});
program("tool", "generateText, openai.chat", async () => {
  const { text } = await generateText({ ...fixed, model: openai.chat(model), prompt: ASK_WEATHER, tools });
  checkWeather(text);
});
program("tool", "streamText, openai", async () => {
  let failed;
  const result = streamText({
    ...fixed, model: openai(model), prompt: ASK_WEATHER, tools, onError({ error }) { failed = error; },
  });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  if (failed) throw failed;
  checkWeather(text);
});
program("tool", "streamText, openai-compatible", async () => {
  let failed;
  const result = streamText({
    ...fixed, model: compatible(model), prompt: ASK_WEATHER, tools, onError({ error }) { failed = error; },
  });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  if (failed) throw failed;
  checkWeather(text);
});
program("tool", "toolChoice required", async () => {
  const { toolCalls } = await generateText({
    ...fixed, stopWhen: stepCountIs(1), model: openai(model), prompt: ASK_WEATHER, tools, toolChoice: "required",
  });
  check(toolCalls.length === 1 && toolCalls[0].input.city === "Paris", toolCalls);
});
program("structured", "generateObject, openai", async () => {
  const { object } = await generateObject({ maxRetries: 0, model: openai(model), prompt: FACTS, schema });
  check(schema.safeParse(object).success, object);
});
program("structured", "generateObject, openai-compatible", async () => {
  const { object } = await generateObject({ maxRetries: 0, model: compatible(model), prompt: FACTS, schema });
  check(schema.safeParse(object).success, object);
});
program("structured", "Output.object", async () => {
  const result = await generateText({
    ...fixed, model: openai(model), prompt: FACTS, output: Output.object({ schema }),
  });
  check(schema.safeParse(result.output).success, result.output);
});
program("structured", "streamObject", async () => {
  let failed;
  const result = streamObject({
    maxRetries: 0, model: openai(model), prompt: FACTS, schema, onError({ error }) { failed = error; },
  });
  let last;
  for await (const part of result.partialObjectStream) last = part;
  if (failed) throw failed;
  check(schema.safeParse(last).success, last);
});

await main();
