// Programs of @openai/agents.
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import {
  ASK_NAME, ASK_WEATHER, check, checkWeather, FACTS, getWeather, HELLO, main, model, NAME, NO_KEY, program, url,
} from "./trial.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: url, apiKey: NO_KEY, maxRetries: 0 });
const City = z.object({ name: z.string(), population: z.number().int() });
const weather = tool({
  name: "get_weather",
  description: "Return the weather in a city.",
  parameters: z.object({ city: z.string() }),
  execute: async (input) => getWeather(input),
});
const agent = (options = {}, Model = OpenAIResponsesModel) =>
  new Agent({ name: "Helper", instructions: "Be brief.", model: new Model(client, model), ...options });

program("first", "run", async () => {
  check((await run(agent(), HELLO)).finalOutput, "no text");
});
program("turns", "previousResponseId", async () => {
  const first = await run(agent(), NAME);
  const second = await run(agent(), ASK_NAME, { previousResponseId: first.lastResponseId });
  check(second.finalOutput.includes("Ada"), second.finalOutput);
});
program("stream", "run, stream", async () => {
  const result = await run(agent(), HELLO, { stream: true });
  for await (const _ of result);
  check(result.finalOutput, "no text");
});
program("tool", "Responses", async () => {
  checkWeather((await run(agent({ tools: [weather] }), ASK_WEATHER)).finalOutput);
});
program("tool", "Chat Completions", async () => {
  checkWeather((await run(agent({ tools: [weather] }, OpenAIChatCompletionsModel), ASK_WEATHER)).finalOutput);
});
program("tool", "run, stream", async () => {
  const result = await run(agent({ tools: [weather] }), ASK_WEATHER, { stream: true });
  for await (const _ of result);
  checkWeather(result.finalOutput);
});
program("structured", "outputType", async () => {
  const { finalOutput } = await run(agent({ outputType: City }), FACTS);
  check(City.safeParse(finalOutput).success, finalOutput);
});

await main();
