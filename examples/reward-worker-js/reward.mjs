// The example's reward: 1 for the right answer. Returns a number, or an object with `score` and other numbers.
// `sample` has prompt, response, promptIds, responseIds, row, truth and finish (stop | length).
export async function reward(sample) {
  return { score: Number(sample.response.trim() === String(sample.truth)), length: sample.responseIds.length };
}
