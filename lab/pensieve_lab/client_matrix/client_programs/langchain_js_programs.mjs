// Programs of LangChain.js and LangGraph.js.
import { tool } from "@langchain/core/tools";
import { MemorySaver } from "@langchain/langgraph";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent } from "langchain";
import { z } from "zod";
import {
  ASK_NAME, ASK_WEATHER, check, checkWeather, FACTS, getWeather, HELLO, main, model, NAME, NO_KEY, program, url,
} from "./trial.mjs";

const City = z.object({ name: z.string(), population: z.number().int() });
const llm = (options = {}) =>
  new ChatOpenAI({ model, apiKey: NO_KEY, maxRetries: 0, configuration: { baseURL: url }, ...options });
const weather = tool(async (input) => getWeather(input), {
  name: "get_weather",
  description: "Return the weather in a city.",
  schema: z.object({ city: z.string() }),
});
const ask = (agent, content, options) => agent.invoke({ messages: [{ role: "user", content }] }, options);

program("first", "invoke", async () => {
  check((await llm().invoke(HELLO)).text, "no text");
});
program("turns", "createAgent with MemorySaver", async () => {
  const agent = createAgent({ model: llm(), tools: [], checkpointer: new MemorySaver() });
  const options = { configurable: { thread_id: "one" } };
  await ask(agent, NAME, options);
  const { messages } = await ask(agent, ASK_NAME, options);
  check(messages.at(-1).text.includes("Ada"), messages);
});
program("stream", "stream", async () => {
  let text = "";
  for await (const piece of await llm().stream(HELLO)) text += piece.text;
  check(text, "no text");
});
program("tool", "createAgent", async () => {
  const { messages } = await ask(createAgent({ model: llm(), tools: [weather] }), ASK_WEATHER);
  checkWeather(messages.at(-1).text);
});
program("tool", "createAgent, Responses", async () => {
  const agent = createAgent({ model: llm({ useResponsesApi: true }), tools: [weather] });
  const { messages } = await ask(agent, ASK_WEATHER);
  checkWeather(messages.at(-1).text);
});
for (const method of ["jsonSchema", "functionCalling", "jsonMode"]) {
  program("structured", `withStructuredOutput, ${method}`, async () => {
    const found = await llm().withStructuredOutput(City, { method, name: "City" }).invoke(FACTS);
    check(City.safeParse(found).success, found);
  });
}

await main();
