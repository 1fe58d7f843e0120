// The columns that PCA looks at. One warp per kept row.

extern "C" __global__ void select_count(
    const int64* indptr, const INDEX* indices, const VALUE* data, const int64* kept, int64 n_kept,
    int n_cols, const int* position, int64* counts) {
    extern __shared__ uint32 bits[];
    const int lane = threadIdx.x & 31;
    column_bits(bits, n_cols, [=](int column) { return position[column] >= 0; });
    for (int64 at = first_warp(); at < n_kept; at += all_warps()) {
        const int64 last = indptr[kept[at] + 1];
        int found = 0;
        #pragma unroll 4
        for (int64 k = indptr[kept[at]] + lane; k < last; k += 32)
            found += has_bit(bits, (int64)indices[k]) && data[k] != (VALUE)0;
        found = warp_count(found);
        if (lane == 0) counts[at] = found;
    }
}

extern "C" __global__ void select_fill(
    const int64* indptr, const INDEX* indices, const VALUE* data, const int64* kept, int64 n_kept,
    int n_cols, const int* position, const int64* out_indptr, OUT_INDEX* out_indices,
    VALUE* out) {
    extern __shared__ uint32 bits[];
    const int lane = threadIdx.x & 31;
    const uint32 before = (1u << lane) - 1u;
    column_bits(bits, n_cols, [=](int column) { return position[column] >= 0; });
    for (int64 at = first_warp(); at < n_kept; at += all_warps()) {
        const int64 last = indptr[kept[at] + 1];
        int64 end = out_indptr[at];
        #pragma unroll 4
        for (int64 base = indptr[kept[at]]; base < last; base += 32) {
            const int64 k = base + lane;
            const int64 column = k < last ? (int64)indices[k] : 0;
            const bool member = k < last && has_bit(bits, column);
            const VALUE value = member ? data[k] : (VALUE)0;
            const bool stored = value != (VALUE)0;
            const uint32 lanes = __ballot_sync(ALL_LANES, stored);
            if (stored) {
                const int64 slot = end + __popc(lanes & before);
                out_indices[slot] = (OUT_INDEX)position[column];
                out[slot] = value;
            }
            end += __popc(lanes);
        }
    }
}

// misfits[0]: a value is no whole number from 0 to 255; misfits[1]: from 0 to 65535.
extern "C" __global__ void whole_numbers(const VALUE* data, int64 n, int* misfits) {
    const int64 stride = (int64)gridDim.x * blockDim.x;
    bool byte = false, word = false;
    #pragma unroll 4
    for (int64 k = (int64)blockIdx.x * blockDim.x + threadIdx.x; k < n; k += stride) {
        const double x = (double)data[k];
        const bool whole = x >= 0.0 && x == floor(x);
        byte |= !(whole && x <= 255.0);
        word |= !(whole && x <= 65535.0);
    }
    if (byte) misfits[0] = 1;
    if (word) misfits[1] = 1;
}
