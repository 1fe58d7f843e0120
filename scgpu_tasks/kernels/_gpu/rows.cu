// Order, duplicates and dense blocks. One warp per row unless said otherwise.

// flags[0]: an index is no column; flags[1]: an index does not rise within its row; flags[2]:
// indptr does not rise from 0 to nnz.
extern "C" __global__ void row_order(
    const int64* indptr, const INDEX* indices, int64 n_rows, int64 n_cols, int64 nnz,
    int* flags) {
    const int lane = threadIdx.x & 31;
    bool outside = false, falls = false, broken = false;
    for (int64 row = first_warp(); row < n_rows; row += all_warps()) {
        const int64 first = indptr[row], last = indptr[row + 1];
        if (first < 0 || first > last || last > nnz || (row == 0 && first != 0) ||
            (row == n_rows - 1 && last != nnz)) {
            broken = true;
            continue;
        }
        #pragma unroll 4
        for (int64 k = first + lane; k < last; k += 32) {
            const int64 column = (int64)indices[k];
            outside |= column < 0 || column >= n_cols;
            falls |= k > first && column <= (int64)indices[k - 1];
        }
    }
    if (outside) flags[0] = 1;
    if (falls) flags[1] = 1;
    if (broken) flags[2] = 1;
}

extern "C" __global__ void row_keys(
    const int64* indptr, const INDEX* indices, int64 n_rows, int64 n_cols, int64* keys) {
    const int lane = threadIdx.x & 31;
    for (int64 row = first_warp(); row < n_rows; row += all_warps()) {
        const int64 last = indptr[row + 1];
        for (int64 k = indptr[row] + lane; k < last; k += 32)
            keys[k] = row * n_cols + (int64)indices[k];
    }
}

// One thread per run of equal keys; a run is added up in stored order (the sort is stable).
extern "C" __global__ void sum_runs(
    const int64* starts, int64 n_runs, int64 nnz, const int64* order, const int64* sorted_keys,
    const VALUE* data, int64 n_cols, INDEX* indices, WIDE* out) {
    const int64 stride = (int64)gridDim.x * blockDim.x;
    for (int64 run = (int64)blockIdx.x * blockDim.x + threadIdx.x; run < n_runs; run += stride) {
        const int64 start = starts[run];
        const int64 stop = run + 1 < n_runs ? starts[run + 1] : nnz;
        WIDE sum = 0;
        for (int64 k = start; k < stop; k++) sum += (WIDE)data[order[k]];
        indices[run] = (INDEX)(sorted_keys[start] % n_cols);
        out[run] = sum;
    }
}

extern "C" __global__ void dense_count(
    const VALUE* values, int64 n_rows, int64 n_cols, int64* counts) {
    const int lane = threadIdx.x & 31;
    for (int64 row = first_warp(); row < n_rows; row += all_warps()) {
        const VALUE* line = values + row * n_cols;
        int64 found = 0;
        for (int64 base = 0; base < n_cols; base += 32) {
            const bool stored = base + lane < n_cols && line[base + lane] != (VALUE)0;
            found += __popc(__ballot_sync(ALL_LANES, stored));
        }
        if (lane == 0) counts[row] = found;
    }
}

extern "C" __global__ void dense_fill(
    const VALUE* values, int64 n_rows, int64 n_cols, const int64* indptr, INDEX* indices,
    VALUE* data) {
    const int lane = threadIdx.x & 31;
    const uint32 before = (1u << lane) - 1u;
    for (int64 row = first_warp(); row < n_rows; row += all_warps()) {
        const VALUE* line = values + row * n_cols;
        int64 end = indptr[row];
        for (int64 base = 0; base < n_cols; base += 32) {
            const VALUE value = base + lane < n_cols ? line[base + lane] : (VALUE)0;
            const bool stored = value != (VALUE)0;
            const uint32 lanes = __ballot_sync(ALL_LANES, stored);
            if (stored) {
                const int64 at = end + __popc(lanes & before);
                indices[at] = (INDEX)(base + lane);
                data[at] = value;
            }
            end += __popc(lanes);
        }
    }
}
