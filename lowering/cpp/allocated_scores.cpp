// Scores of queries with the keys in pages. Needs allocated_scores.h.
//
// q: [BH, R, D]. cos, sin: [B, N, pairs], the rotations of the middle tokens of pages (page-relative RoPE); pairs = 0
// means that keys are not page-relative. relative_cos, relative_sin: [B, pairs, PAGE / 2], the rotations of the tokens
// before the middle, relative to it. mean: [BH, D], the mean that was subtracted from keys before rotary embedding,
// used if centered is 1. basis: [BH, D, b]. places: [BH, NUM_FIELDS]. pages: [BH, room, PAGE_BYTES], of which count are
// read. out: [BH, R, count * PAGE].
extern "C" void kernel(
    const float* q, const float* cos, const float* sin, const float* relative_cos, const float* relative_sin,
    const float* mean, const uint8_t* pages, const float* basis,
    const int32_t* places, const float* table, float* out, int64_t batch, int64_t heads, int64_t count, int64_t room,
    int64_t pairs, int64_t interleaved, int64_t centered, int64_t threads
) {
    const int64_t parts = parts_of(count, threads);
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < batch * heads; h++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t b = h / heads, begin = part * count / parts, end = (part + 1) * count / parts;
            float padded_cos[HEAD / 2 * BEFORE_MIDDLE], padded_sin[HEAD / 2 * BEFORE_MIDDLE];
            for (int i = 0; i < (centered ? pairs : 0); i++) {
                const int64_t row = (b * pairs + i) * (PAGE / 2);
                std::memcpy(padded_cos + i * BEFORE_MIDDLE, relative_cos + row, PAGE / 2 * sizeof(float));
                std::memcpy(padded_sin + i * BEFORE_MIDDLE, relative_sin + row, PAGE / 2 * sizeof(float));
            }
            const int64_t first = b * count * pairs;
            const PageRope<float> rope = {
                cos + first, sin + first, pairs, (int)pairs, (int)interleaved, padded_cos, padded_sin};
            const Head head(basis + h * HEAD * BLOCK, places + h * NUM_FIELDS, table + GAINS, Layout());
            Scorer<float> scorer(head, rope, centered ? mean + h * HEAD : nullptr);
            float* found = out + (h * QUERIES * count + begin) * PAGE;
            const uint8_t* own = pages + h * room * PAGE_BYTES;
            scorer(q + h * QUERIES * HEAD, own, room, begin, end, table, found, count * PAGE);
        }
}
