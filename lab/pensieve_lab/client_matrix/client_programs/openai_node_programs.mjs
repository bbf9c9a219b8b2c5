// Programs of openai for JavaScript.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import {
  ASK_NAME, ASK_WEATHER, check, checkWeather, FACTS, getWeather, HELLO, main, model, NAME, NO_KEY, program, url,
  weatherParameters,
} from "./trial.mjs";

const client = new OpenAI({ baseURL: url, apiKey: NO_KEY, maxRetries: 0 });
const user = (content) => [{ role: "user", content }];
const City = z.object({ name: z.string(), population: z.number().int() });
const runnable = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Return the weather in a city.",
    parameters: weatherParameters,
    parse: JSON.parse,
    function: getWeather,
  },
};

program("first", "responses.create", async () => {
  check((await client.responses.create({ model, input: HELLO })).output_text, "no text");
});
program("first", "chat.completions.create", async () => {
  const answer = await client.chat.completions.create({ model, messages: user(HELLO) });
  check(answer.choices[0].message.content, answer);
});
program("turns", "previous_response_id", async () => {
  const first = await client.responses.create({ model, input: NAME });
  const second = await client.responses.create({ model, input: ASK_NAME, previous_response_id: first.id });
  check(second.output_text.includes("Ada"), second.output_text);
});
program("stream", "chat", async () => {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ model, messages: user(HELLO), stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
  }
  check(text, "no text");
});
program("stream", "responses", async () => {
  const final = await client.responses.stream({ model, input: HELLO }).finalResponse();
  check(final.output_text, final);
});
program("tool", "runTools", async () => {
  const runner = client.chat.completions.runTools({ model, messages: user(ASK_WEATHER), tools: [runnable] });
  checkWeather(await runner.finalContent());
});
program("tool", "runTools, stream", async () => {
  const runner = client.chat.completions.runTools({
    model, messages: user(ASK_WEATHER), tools: [runnable], stream: true,
  });
  checkWeather(await runner.finalContent());
});
program("tool", "responses, previous_response_id", async () => {
  const tools = [{ type: "function", name: "get_weather", parameters: weatherParameters, strict: true }];
  const first = await client.responses.create({ model, input: ASK_WEATHER, tools });
  const call = first.output.find((item) => item.type === "function_call");
  check(call, first.output);
  const output = getWeather(JSON.parse(call.arguments));
  const second = await client.responses.create({
    model, tools, previous_response_id: first.id,
    input: [{ type: "function_call_output", call_id: call.call_id, output }],
  });
  checkWeather(second.output_text);
});
program("structured", "chat.completions.parse", async () => {
  const answer = await client.chat.completions.parse({
    model, messages: user(FACTS), response_format: zodResponseFormat(City, "city"),
  });
  check(City.safeParse(answer.choices[0].message.parsed).success, answer.choices[0].message);
});
program("structured", "responses.parse", async () => {
  const answer = await client.responses.parse({ model, input: FACTS, text: { format: zodTextFormat(City, "city") } });
  check(City.safeParse(answer.output_parsed).success, answer.output);
});

await main();
