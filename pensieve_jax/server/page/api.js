// Requests to the server, and the error for a refused one.

import { eventsOf } from "./sse.js";

const KEY = "pensieve-key"; // in sessionStorage: it lasts as long as the tab

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** An error response of the server, with the HTTP `status` and the `wait_ms` before a retry makes sense. */
export class Refused extends Error {
  constructor(message, status = 0, wait_ms = 0) {
    super(message);
    this.status = status;
    this.wait_ms = wait_ms;
  }
}

async function ask(method, path, body, signal) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (response.ok) return response;
  const failure = await response.json().catch(() => null);
  const wait_ms = 1000 * (Number(response.headers.get("Retry-After")) || 0);
  throw new Refused(failure?.error?.message ?? `The server answered ${response.status}.`, response.status, wait_ms);
}

export const get = async (path) => (await ask("GET", path)).json();
export const post = async (path, body) => (await ask("POST", path, body)).json();
export const remove = async (path) => (await ask("DELETE", path)).json();
export const stream = async (method, path, body, signal) => eventsOf(await ask(method, path, body, signal));
