-- One SELECT a file; the file's name is the view's name.
SELECT po.id, po.customer, po.order_date, po.status,
       SUM(ol.quantity * ol.price) AS total,
       ARRAY_AGG(STRUCT(ol.id, ol.item, ol.quantity, ol.price)) FILTER (WHERE ol.id IS NOT NULL) AS lines
FROM purchase_orders po LEFT JOIN order_lines ol ON ol.order_id = po.id
GROUP BY po.id, po.customer, po.order_date, po.status
