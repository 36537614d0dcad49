/** Names of requests and results are those of OpenAI's API. */

/** A message of a conversation, as the model's chat template reads it. */
export interface Message {
  role: 'system' | 'user' | 'assistant' | (string & {});
  content: string;
}

/** Where a model runs: `auto` on the browser's GPU if it is usable, `any` also on a software
 *  renderer, `off` on the CPU. */
export type Gpu = 'auto' | 'any' | 'off';

export interface OpenOptions {
  /** A GGUF file, or its URL. Without one, the small built-in model. */
  model?: Blob | string | URL;
  gpu?: Gpu;
  /** Stops a download. */
  signal?: AbortSignal;
  /** Bytes of a download so far, and in all (0 where the server does not tell). */
  onDownload?(loaded: number, total: number): void;
}

/** Description of an open model. */
export interface About {
  /** Name in the file. */
  name: string | null;
  /** Context length in tokens. */
  n_ctx: number;
  device: string;
  kernels: string;
  /** Default KV types of K and V. */
  types: [string, string];
  /** Default sampling options. */
  temperature: number;
  top_p: number;
  /** Name of the GPU, if the model runs on one. */
  gpu?: string;
  /** Why it does not. */
  without?: string;
}

export interface ChatOptions {
  /** Stops the answer: the loop throws. */
  signal?: AbortSignal;
  /** KV type of keys and values, or `K/V`: turbo2, turbo3 (default), turbo4, q8_0, f16. */
  kv_type?: string;
  /** 0 is greedy sampling. */
  temperature?: number;
  top_p?: number;
  max_tokens?: number;
  seed?: number;
}

/** Prefill so far, in tokens of the prompt. */
export interface Prefill {
  total: number;
  cached: number;
  done: number;
}

export interface Finished {
  finish_reason: 'stop' | 'length';
  prompt_tokens: number;
  /** Tokens of the prompt that were in the KV cache. */
  cached_tokens: number;
  completion_tokens: number;
  /** Bytes of the conversation's KV cache, and of one in f16. */
  kv_bytes: number;
  kv_bytes_f16: number;
  /** Tokens per second. */
  prefill_per_second: number;
  decode_per_second: number;
}

/** An event of an answer: one of the three. */
export type ChatEvent =
  | { prefill: Prefill; text?: undefined; finished?: undefined }
  | { text: string; prefill?: undefined; finished?: undefined }
  | { finished: Finished; prefill?: undefined; text?: undefined };

/** Sizes of the KV caches of a model's conversations in bytes. */
export interface Kv {
  /** Allocated; shared blocks count once. */
  bytes: number;
  running_bytes: number;
  running_bytes_f16: number;
  idle_bytes: number;
  idle_bytes_f16: number;
  /** Conversations with a cache and no running answer. */
  idle: number;
  /** Requests that wait for the running one. */
  waiting: number;
  budget: number;
}

/** A model in a worker of its own. */
export class Kvant {
  /** Opens a model. Throws a line that says why where that fails. */
  static open(options?: OpenOptions): Promise<Kvant>;
  readonly about: About;
  /** Why the model is no longer usable; empty as long as it is. */
  readonly over: string;
  /** Answers a conversation. One that continues an earlier one prefills only what is new. Requests
   *  run one after the other. */
  chat(messages: Message[], options?: ChatOptions): AsyncGenerator<ChatEvent, void, undefined>;
  /** Answers a conversation at once. */
  complete(messages: Message[], options?: ChatOptions): Promise<Finished & { text: string }>;
  kv(): Promise<Kv>;
  /** Ends the worker and frees its memory. */
  close(reason?: string): void;
}
