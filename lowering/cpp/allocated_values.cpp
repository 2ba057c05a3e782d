// Weighted sums of the values in pages. Needs allocated_values.h.
//
// weights: [BH, R, count * PAGE]. out: [BH, R, D]. samples: BH. Other arguments are those of allocated_scores.cpp.
extern "C" void kernel(
    const float* weights, const uint8_t* pages, const float* basis, const int32_t* places, const float* table,
    float* out, int64_t samples, int64_t count, int64_t room, int64_t threads
) {
    const int64_t parts = parts_of(count, threads);
    std::vector<Total> totals(samples * parts);
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < samples; h++)
        for (int64_t part = 0; part < parts; part++) {
            const int64_t begin = part * count / parts, end = (part + 1) * count / parts;
            const float* part_weights = weights + (h * QUERIES * count + begin) * PAGE;
            const uint8_t* own = pages + h * room * PAGE_BYTES;
            Total& total = totals[h * parts + part];
            total.add_pages(own, Layout(), room, begin, end, table, part_weights, count * PAGE);
        }
    std::fill(out, out + samples * QUERIES * HEAD, 0.0f);
    for (int64_t h = 0; h < samples; h++) {
        Total& total = totals[h * parts];
        for (int64_t part = 1; part < parts; part++)
            for (int r = 0; r < QUERIES; r++) total.add(totals[h * parts + part], r, 1);
        total.put(basis + h * HEAD * BLOCK, places + h * NUM_FIELDS, table, out + h * QUERIES * HEAD);
    }
}
